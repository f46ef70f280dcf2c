"""Sampling with transformers: 64 tokens of prompt, two threads, fp32. Prints tokens/s by batch size for answers of 128
tokens, then for 32 answers of log-normal lengths in one static batch, which runs until the longest is done.

torch_generate.py MODEL_DIR
"""
import sys
import time

import torch
from transformers import AutoModelForCausalLM

# As in bench_generate.rs.
LENGTHS = [64, 81, 51, 31, 44, 29, 67, 187, 43, 39, 95, 85, 70, 30, 63, 112, 22, 44, 14, 23, 15, 53, 23, 80, 73, 55, 9, 42, 62, 70, 19, 44]

torch.set_num_threads(2)
torch.manual_seed(1234)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()


def seconds(batch, tokens):
    ids = torch.randint(3, model.config.vocab_size, (batch, 64))
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **settings)
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens, **settings)
    return time.perf_counter() - start


for batch in (1, 8, 32):
    print(f"{batch}: {batch * 128 / seconds(batch, 128):.1f} tokens/s")
print(f"log-normal: {sum(LENGTHS) / seconds(len(LENGTHS), max(LENGTHS)):.1f} tokens/s")
