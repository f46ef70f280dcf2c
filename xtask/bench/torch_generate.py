"""Sampling with transformers: 64 tokens of prompt, 128 of answer, two threads, fp32. Prints tokens/s by batch size.

torch_generate.py MODEL_DIR
"""
import sys
import time

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(2)
torch.manual_seed(1234)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
for batch in (1, 8, 32):
    ids = torch.randint(3, model.config.vocab_size, (batch, 64))
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **settings)
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=128, max_new_tokens=128, **settings)
    print(f"{batch}: {batch * 128 / (time.perf_counter() - start):.1f} tokens/s")
