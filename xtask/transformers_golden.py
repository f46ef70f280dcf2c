"""Records what `transformers` computes for a model that Aligner has saved.

    pip install torch transformers
    python3 xtask/transformers_golden.py runs/dpo_smollm2/model target/transformers_golden
    ALIGNER_GOLDEN=$PWD/target/transformers_golden cargo test --release --workspace --test golden_models logits_logps

The second line loads the model and its tokenizer with `transformers` and writes logits, log-probabilities and greedy
continuations in the layout of tests/golden/models; the third runs Aligner's golden tests on them.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ["Hello world, 2024!", "Once upon a time, there was a little", "How was the fish stew at the Old Mill?"]
NEW_TOKENS = 24


@torch.no_grad()
def logits_of(model, ids, mask=None, positions=None):
    """Logits `[batch, tokens, vocab]` in f32."""
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()


def logps_of(logits, ids):
    """Log-probability of each next token, `[batch, tokens - 1]`."""
    logps = logits[:, :-1].log_softmax(-1)
    return logps.gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def greedy(model, ids, end_ids):
    """Greedy tokens with the end tokens held back, and the smallest margin of first and second choice."""
    tokens, margin = [], float("inf")
    for _ in range(NEW_TOKENS):
        last = logits_of(model, ids)[0, -1].clone()
        last[end_ids] = -float("inf")
        best = last.topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        tokens.append(best.indices[0].item())
        ids = torch.cat([ids, best.indices[:1, None]], dim=1)
    return tokens, margin


def chat_ids(tokenizer, text):
    """The chat template's rendering of one user turn, as token ids."""
    if tokenizer.chat_template is None:
        return tokenizer(text, add_special_tokens=False).input_ids
    turn = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return tokenizer(rendered, add_special_tokens=False).input_ids


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("golden", type=Path)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    end_ids = model.generation_config.eos_token_id
    end_ids = [end_ids] if isinstance(end_ids, int) else list(end_ids or [])

    tensors, sequences, rows = {}, [], []
    for at, text in enumerate(TEXTS):
        row = chat_ids(tokenizer, text)
        rows.append(row)
        ids = torch.tensor([row])
        logits = logits_of(model, ids)
        logps = logps_of(logits, ids)
        tensors[f"logits_{at}"] = logits[0].contiguous()
        tensors[f"logprobs_{at}"] = logps[0].contiguous()
        tokens, margin = greedy(model, ids, end_ids)
        sequences.append({"input_ids": row, "greedy": tokens, "greedy_min_margin": margin,
                          "sum_logprob": logps.sum().item()})
        print(f"{text!r} -> {tokenizer.decode(tokens)!r} (smallest margin {margin:.4f})")

    place = arguments.golden / "models" / f"llama_{arguments.model.parent.name}"
    place.mkdir(parents=True, exist_ok=True)
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]:
        if (arguments.model / name).exists():
            shutil.copy(arguments.model / name, place / name)
    save_file(tensors, place / "expected.safetensors")
    expected = {"arch": "llama", "vocab": model.config.vocab_size, "sequences": sequences}
    (place / "expected.json").write_text(json.dumps(expected))
    (arguments.golden / "models" / "index.json").write_text(json.dumps({"models": {place.name: {}}}))
    print(f"wrote {place}")


if __name__ == "__main__":
    main()
