"""Makes files of `torch.save` and of torch's eight-bit numbers, with what is in them.

    pip install torch transformers safetensors
    python3 xtask/pytorch_golden.py tests/golden/pytorch

`mixed.bin` has tensors of every kind that a checkpoint may have, `mixed.safetensors` their elements as `f32` in
row-major order; `model/` is a model in shards with an index, `model.safetensors` its tensors. `f8.safetensors` has all
256 numbers of both types, `f8_expected.safetensors` what torch makes of them.
"""

import argparse
import collections
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig


def mixed(place):
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    base, tied = draw(6, 8), draw(4, 3)
    tensors = {
        "f32": draw(3, 5), "f64": draw(2, 3).double(), "f16": draw(7).half(), "bf16": draw(2, 2, 3).bfloat16(),
        "scalar": draw(1)[0], "empty": torch.zeros(0, 4), "parameter": torch.nn.Parameter(draw(5)),
        "transposed": base.t(), "columns": base[1:5, 2:7:2], "row": base[3], "permuted": draw(2, 3, 4).permute(2, 0, 1),
        "tied.a": tied, "tied.b": tied, "f8": draw(9).to(torch.float8_e4m3fn),
    }
    state = collections.OrderedDict(tensors)
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    torch.save(state, place / "mixed.bin")
    plain = {name: value.detach().float().clone().contiguous() for name, value in tensors.items()}
    save_file(plain, place / "mixed.safetensors")
    torch.save({**tensors, "step": torch.tensor([3])}, place / "whole_numbers.bin")
    torch.save({"model": tensors}, place / "nested.bin")
    torch.save(tensors, place / "old.bin", _use_new_zipfile_serialization=False)


def model(place):
    config = LlamaConfig(vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, dtype="float32")
    torch.manual_seed(6)
    whole = AutoModelForCausalLM.from_config(config).float()
    directory = place / "model"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    (directory / "config.json").write_text(config.to_json_string())
    # A tied head is in a pickle too, and shares the embedding's storage.
    state = {name: value.detach() for name, value in whole.state_dict().items()}
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    names = sorted(state)
    shards = {"pytorch_model-00001-of-00002.bin": names[:7], "pytorch_model-00002-of-00002.bin": names[7:]}
    for shard, held in shards.items():
        torch.save({name: state[name] for name in held}, directory / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    save_file({name: value.clone() for name, value in state.items()}, place / "model.safetensors")


def eight_bits(place):
    numbers = torch.arange(256, dtype=torch.uint8)
    types = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    save_file({name: numbers.clone().view(dtype) for name, dtype in types.items()}, place / "f8.safetensors")
    save_file({name: numbers.view(dtype).float() for name, dtype in types.items()}, place / "f8_expected.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path)
    place = parser.parse_args().place
    place.mkdir(parents=True, exist_ok=True)
    mixed(place)
    model(place)
    eight_bits(place)


if __name__ == "__main__":
    main()
