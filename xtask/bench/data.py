"""Makes a random 27.4 M Llama model and the token ids that both sides of the training benchmark run on.

usage: data.py OUT_DIR   (needs torch, transformers and numpy)
"""
import json, os, sys
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

OUT, VOCAB, SEED, PROMPT = sys.argv[1], 4096, 1234, 64
os.makedirs(OUT, exist_ok=True)

torch.manual_seed(20240)
LlamaForCausalLM(LlamaConfig(
    vocab_size=VOCAB, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1376,
    max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)).save_pretrained(f"{OUT}/model")


def rows(n, t, seed):
    return torch.randint(8, VOCAB, (n, t), generator=torch.Generator().manual_seed(seed))


def pairs(seed):
    """Eight chosen rows, then eight rejected ones that begin with the same prompts."""
    x = rows(16, 192, seed)
    x[8:, :PROMPT] = x[:8, :PROMPT]
    return x.tolist()


normal = np.random.default_rng(11).normal(np.log(96.0), 0.7, 64)
lengths = np.clip(np.round(np.exp(normal)), 16, 256).astype(int).tolist()
json.dump({
    "full": [rows(8, 256, SEED + i).tolist() for i in range(4)],
    "variable": [[rows(1, n, SEED + i + j)[0].tolist() for j, n in enumerate(lengths[i:i + 8])] for i in range(0, 64, 8)],
    "pairs": [pairs(SEED + i) for i in range(2)],
}, open(f"{OUT}/data.json", "w"))
