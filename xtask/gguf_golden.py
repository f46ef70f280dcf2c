"""Makes small GGUF files of every family, and records what `transformers` computes with the same weights.

    pip install torch transformers safetensors gguf
    python3 xtask/gguf_golden.py tests/golden/gguf/families

Each file is written by the `gguf` package under the names of its own table, as llama.cpp's converter orders and shifts
the elements. Beside it stands a JSON file: the model's `config.json`, a row of tokens with its logits, and a hash of
each dequantised tensor under Hugging Face's name. The weights of the model that computes the logits are those that
the file holds, read back with `gguf.dequantize`. `q8_0.json` has rows with what `gguf.quantize` makes of them.
"""

import argparse
import hashlib
import json
import re
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig,
    Olmo2Config, Phi3Config, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig,
)

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TIED = {**SIZES, "tie_word_embeddings": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Architecture, configuration, type of the matrices.
MODELS = {
    "llama": ("llama", LlamaConfig(**TIED, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3), T.F32),
    "mistral": ("llama", MistralConfig(**SIZES, head_dim=8, sliding_window=4), T.F16),
    "mixtral": ("llama", MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2), T.Q8_0),
    "qwen2": ("qwen2", Qwen2Config(**TIED), T.F32),
    "qwen3": ("qwen3", Qwen3Config(**SIZES, head_dim=16), T.BF16),
    "qwen2_moe": ("qwen2moe", Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=64), T.Q8_0),
    "qwen3_moe": ("qwen3moe", Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True), T.Q8_0),
    "gemma2": ("gemma2", Gemma2Config(**TIED, head_dim=16, query_pre_attn_scalar=16, sliding_window=4,
                                      attn_logit_softcapping=4.0, final_logit_softcapping=2.0), T.F32),
    "gemma3": ("gemma3", Gemma3TextConfig(**{**TIED, "num_hidden_layers": 3}, head_dim=16, query_pre_attn_scalar=16,
                                          sliding_window=4, layer_types=["sliding_attention", "sliding_attention",
                                                                         "full_attention"]), T.F16),
    "gpt2": ("gpt2", GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1,
                                eos_token_id=2, pad_token_id=0), T.F32),
    "phi3": ("phi3", Phi3Config(**SIZES, sliding_window=4, original_max_position_embeddings=64), T.F16),
    "olmo2": ("olmo2", Olmo2Config(**SIZES), T.F32),
}
LENGTH = 11


def randomize(model, generator):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            shift = 0.0 if "gemma" in model.config.model_type or name.endswith("bias") else 1.0
            parameter.copy_(shift + 0.3 * noise if parameter.dim() < 2 else 0.25 * noise)


def interleave(weights, heads):
    """Hugging Face's rows to those of an `llama` file."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))


def half_split(weights, heads):
    """The inverse of `interleave`."""
    split = weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))


class Convention:
    """What a file of an architecture does to the elements of one tensor, and its inverse."""

    def __init__(self, arch, config, name):
        self.heads = None
        if arch == "llama" and re.search(r"[qk]_proj\.", name):
            self.heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        self.shift = 1.0 if arch.startswith("gemma") and name.endswith("norm.weight") else 0.0
        self.turned = arch == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight$", name)

    def stored(self, values):
        values = interleave(values, self.heads) if self.heads else values
        values = values.T if self.turned else values
        values = values + np.float32(self.shift) if self.shift else values
        return np.ascontiguousarray(np.squeeze(values))

    def restored(self, values, shape):
        values = values - np.float32(self.shift) if self.shift else values
        values = values.T if self.turned else values
        values = half_split(values, self.heads) if self.heads else values
        return np.ascontiguousarray(values.reshape(shape)).astype("<f4")


def stacks(state):
    """Tensors under the names of the converter: of experts one for all, with the names that are in it."""
    out = {}
    for name, values in state.items():
        found = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name)
        if not found:
            out[name] = ([name], values)
            continue
        before, _, linear = found.groups()
        merged = f"{before}.experts.{linear}.weight".replace("model.layers", "layers") if linear[0] == "w" \
            else f"{before}.experts.{linear}.weight"
        merged = merged.replace("block_sparse_moe", "feed_forward")
        names, parts = out.get(merged, ([], []))
        out[merged] = (names + [name], parts + [values])
    return {name: (names, np.stack(values) if isinstance(values, list) else values)
            for name, (names, values) in out.items()}


def add_keys(writer, arch, config):
    get = lambda key: getattr(config, key, None)
    if arch == "gpt2":
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_block_count(config.n_layer)
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if get("head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch in ["llama", "phi3"]:
        writer.add_rope_dimension_count(get("head_dim") or config.hidden_size // config.num_attention_heads)
    if rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch in ["gemma2", "gemma3", "phi3", "llama"] and get("sliding_window"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = get("num_local_experts") or get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def divisors(config):
    """The divisors of rotary frequencies: plain over scaled ones, both of transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    dim = config.head_dim
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    return (plain / scaled).numpy().astype(np.float32)


def write(path, arch, config, state, kind):
    """Writes the file; the tensors that it holds, under Hugging Face's names."""
    writer = gguf.GGUFWriter(path, arch)
    add_keys(writer, arch, config)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[{v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch].name],
                                     config.num_hidden_layers)
    held = {}
    for name, (parts, values) in stacks(state).items():
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored, name
        convention = Convention(arch, config, name)
        data = convention.stored(values)
        plain = data.ndim < 2 or "norm" in stored or "ffn_gate_inp" in stored or "position_embd" in stored
        own = T.F32 if plain else kind
        packed = gguf.quantize(data, own)
        writer.add_tensor(stored, packed, raw_dtype=own)
        back = gguf.dequantize(packed, own).reshape(data.shape)
        if len(parts) > 1:
            held.update({part: np.ascontiguousarray(one).astype("<f4") for part, one in zip(parts, back)})
        else:
            held[name] = convention.restored(back, values.shape)
    if config.model_type == "llama":
        writer.add_tensor("rope_freqs.weight", divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def record(name, arch, config, kind, place):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    randomize(model, generator)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        file = Path(scratch) / "model.safetensors"
        held = write(place / f"{name}.gguf", arch, config, load_file(file), kind)
        save_file(held, file, metadata={"format": "pt"})
        said = json.loads((Path(scratch) / "config.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(3, 48, (1, LENGTH), generator=generator)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    hashes = {key: hashlib.sha256(value.tobytes()).hexdigest() for key, value in sorted(held.items())}
    golden = {"config": said, "input_ids": ids[0].tolist(), "tensors": hashes,
              "logits": [float(f"{value:.7g}") for value in logits.flatten().tolist()]}
    (place / f"{name}.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    print(f"{name}: {(place / f'{name}.gguf').stat().st_size} bytes, largest logit {logits.abs().max():.3f}")


def quantised_rows(place):
    """Rows of several magnitudes, ties and zeros, and their Q8_0 blocks."""
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((24, 32)).astype(np.float32) * (10.0 ** rng.integers(-8, 5, (24, 1))).astype(np.float32)
    rows[0] = 0
    # Half way between two steps of 1: away from zero.
    rows[1] = np.linspace(-63.5, 63.5, 32, dtype=np.float32)
    rows[1, 0] = 127
    rows[2] = np.float32(1e-30)
    blocks = gguf.quantize(rows, T.Q8_0)
    golden = {"f32": rows.astype("<f4").tobytes().hex(), "q8_0": blocks.tobytes().hex()}
    (place / "q8_0.json").write_text(json.dumps(golden) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path)
    place = parser.parse_args().place
    place.mkdir(parents=True, exist_ok=True)
    for name, (arch, config, kind) in MODELS.items():
        record(name, arch, config, kind, place)
    quantised_rows(place)


if __name__ == "__main__":
    main()
