"""Records what PEFT computes for an adapter that Aligner has saved.

    pip install torch transformers peft
    python3 xtask/peft_golden.py runs/lora/model target/peft_golden [--base MODEL]
    ALIGNER_GOLDEN=$PWD/target/peft_golden cargo test --release --workspace --test lora_golden --test lora

The second line loads base and adapter with PEFT and writes logits, loss, gradients, greedy continuations and merged
weights in the layout of tests/golden/lora; the third runs Aligner's golden tests on them. The base must be a Hugging
Face directory.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

ROWS, TOKENS, UNLABELLED, NEW_TOKENS = 2, 17, 4, 24


def base_model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=ids, use_cache=False).logits.float()


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
    return torch.tensor(tokens), margin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--base", type=Path)
    arguments = parser.parse_args()
    config = json.loads((arguments.adapter / "adapter_config.json").read_text())
    base_path = arguments.base or Path(config["base_model_name_or_path"])
    base = base_model(base_path)
    model = PeftModel.from_pretrained(base_model(base_path), arguments.adapter, is_trainable=True).eval()

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, base.config.vocab_size, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, :UNLABELLED] = -100
    tensors = {"input_ids": ids, "labels": labels, "logits": logits_of(model, ids), "logits_base": logits_of(base, ids)}
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    loss.backward()
    tensors["loss"] = loss.detach().reshape(1)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            own = name.replace(".default", "").replace(".modules_to_save", "")
            tensors["grad." + own] = parameter.grad.contiguous()
    # Id 2 is the end token of the golden models; the tests hold it back.
    tensors["greedy"], margin = greedy(model, ids[:1], [2])
    before = base.state_dict()
    tied = base.config.tie_word_embeddings
    for name, value in model.merge_and_unload().state_dict().items():
        if not torch.equal(value, before[name]) and not (tied and name == "lm_head.weight"):
            tensors["merged." + name] = value.detach().contiguous()

    place = arguments.golden / "lora" / arguments.adapter.resolve().parent.name
    shutil.copytree(arguments.adapter, place, dirs_exist_ok=True)
    shutil.copytree(base_path, arguments.golden / "models" / base_path.name, dirs_exist_ok=True)
    config["base_model_name_or_path"] = f"../models/{base_path.name}"
    (place / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, place / "expected.safetensors")
    print(f"loss {loss.item():.5f}, smallest greedy margin {margin:.4f}; wrote {place}")


if __name__ == "__main__":
    main()
