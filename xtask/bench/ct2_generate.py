"""Sampling with CTranslate2: 64 tokens of prompt, 128 of answer, two threads, float32. Prints tokens/s by batch size.

ct2_generate.py MODEL_DIR CONVERTED_DIR

MODEL_DIR has a tokenizer; CONVERTED_DIR comes from `ct2-transformers-converter --model MODEL_DIR --output_dir CONVERTED_DIR`.
"""
import random
import sys
import time

import ctranslate2
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
generator = ctranslate2.Generator(sys.argv[2], device="cpu", compute_type="float32", inter_threads=1, intra_threads=2)
random.seed(1234)
for batch in (1, 8, 32):
    ids = [[random.randrange(8, 4096) for _ in range(64)] for _ in range(batch)]
    prompts = [tokenizer.convert_ids_to_tokens(row) for row in ids]
    settings = dict(max_batch_size=batch, sampling_topk=0, sampling_temperature=1.0, include_prompt_in_result=False, end_token=[2])
    generator.generate_batch(prompts, max_length=4, min_length=4, **settings)
    start = time.perf_counter()
    generator.generate_batch(prompts, max_length=128, min_length=128, **settings)
    print(f"{batch}: {batch * 128 / (time.perf_counter() - start):.1f} tokens/s")
