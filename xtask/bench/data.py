"""Writes the token ids that the PyTorch training scripts draw, so that both sides train on the same rows.

usage: data.py VOCAB OUT.json   (needs torch and numpy)
"""
import json, sys
import numpy as np
import torch

VOCAB, OUT = int(sys.argv[1]), sys.argv[2]
SEED = 1234


def rows(n, t, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(8, VOCAB, (n, t), generator=g)


def shared_prompts(x, prompt=64):
    pairs = x.shape[0] // 2
    x[pairs:, :prompt] = x[:pairs, :prompt]
    return x


r = np.random.default_rng(11)
lengths = np.clip(np.round(np.exp(r.normal(np.log(96.0), 0.7, 64))), 16, 256).astype(int).tolist()
json.dump({
    "full": [rows(8, 256, SEED + i).tolist() for i in range(4)],
    "variable": [[rows(1, n, SEED + i + j)[0].tolist() for j, n in enumerate(lengths[i:i + 8])] for i in range(0, 64, 8)],
    "pairs": [shared_prompts(rows(16, 192, SEED + i)).tolist() for i in range(2)],
}, open(OUT, "w"))
