"""Records what `transformers` computes for tiny random models of the families that have no other golden values.

    pip install torch transformers
    python3 xtask/families_golden.py tests/golden

Writes `models/phi3`, `models/olmo2` and `models/qwen3_moe_steps` in the layout of tests/golden/models, and
`train/balance.json`: the loss on an uneven use of experts, and its gradients, of models that are there already.
Prompts are drawn again until no greedy step is close, so that tokens can be compared exactly.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Olmo2Config, Phi3Config, Qwen3MoeConfig

from transformers_golden import greedy, logits_of, logps_of

SIZES = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "phi3": Phi3Config(**SIZES, sliding_window=8, original_max_position_embeddings=256),
    "olmo2": Olmo2Config(**SIZES),
    # Every second layer is dense, and weights of experts are not made to sum to 1.
    "qwen3_moe_steps": Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=16, moe_intermediate_size=32, num_experts=5,
        num_experts_per_tok=3, decoder_sparse_step=2, mlp_only_layers=[], norm_topk_prob=False,
    ),
}
MARGIN = 2e-3


def randomize(model, generator):
    """Weights that are far from their start: wide matrices, norms around 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() < 2 else 0.15 * noise)


def sequence(model, generator, length):
    """A prompt without a close greedy step: ids, tokens, the smallest margin."""
    while True:
        ids = torch.randint(3, model.config.vocab_size, (1, length), generator=generator)
        tokens, margin = greedy(model, ids, [model.config.eos_token_id])
        if margin >= MARGIN:
            return ids, tokens, margin


def record(name, config, golden):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    randomize(model, generator)
    place = golden / "models" / name
    shutil.rmtree(place, ignore_errors=True)
    model.save_pretrained(place)
    (place / "generation_config.json").unlink(missing_ok=True)
    tensors, sequences = {}, []
    for at, length in enumerate([5, 11, 17]):
        ids, tokens, margin = sequence(model, generator, length)
        logits = logits_of(model, ids)
        tensors[f"logits_{at}"] = logits[0].contiguous()
        tensors[f"logprobs_{at}"] = logps_of(logits, ids)[0].contiguous()
        sequences.append({"input_ids": ids[0].tolist(), "greedy": tokens, "greedy_min_margin": margin})
    lengths, longest = [4, 9, 6], 9
    rows = torch.zeros(3, longest, dtype=torch.long)
    mask = torch.zeros(3, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        rows[row, longest - length:] = torch.randint(3, config.vocab_size, (length,), generator=generator)
        mask[row, longest - length:] = 1
    logits = logits_of(model, rows, mask, (mask.cumsum(-1) - 1).clamp(min=0))
    tensors["batch_logprobs"] = (logps_of(logits, rows) * mask[:, :-1]).contiguous()
    save_file(tensors, place / "expected.safetensors")
    batch = {"input_ids": rows.tolist(), "attention_mask": mask.tolist()}
    (place / "expected.json").write_text(json.dumps({"arch": name, "sequences": sequences, "batch": batch}))
    print(f"wrote {place}")


def balance(golden):
    """The balance loss of two rows alone, with the gradient's norm for each router."""
    cases = {}
    for name in ["mixtral", "qwen2_moe"]:
        model = AutoModelForCausalLM.from_pretrained(golden / "models" / name, dtype=torch.float32).eval()
        ids = torch.randint(3, 320, (1, 23), generator=torch.Generator().manual_seed(7))
        loss = model(input_ids=ids, output_router_logits=True).aux_loss
        loss.backward()
        norms = {key: value.grad.norm().item() for key, value in model.named_parameters()
                 if value.grad is not None and key.endswith("mlp.gate.weight")}
        norms = {key.replace("mlp.gate", "block_sparse_moe.gate") if name == "mixtral" else key: norm
                 for key, norm in norms.items()}
        cases[name] = {"input_ids": ids[0].tolist(), "loss": loss.item(), "router_grad_norms": norms}
    (golden / "train" / "balance.json").write_text(json.dumps(cases))
    print(cases)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden", type=Path)
    golden = parser.parse_args().golden
    for name, config in CONFIGS.items():
        record(name, config, golden)
    balance(golden)


if __name__ == "__main__":
    main()
