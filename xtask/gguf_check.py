"""Checks GGUF files that `aligner convert` writes with the `gguf` package and with transformers.

    pip install torch transformers safetensors gguf
    cargo build --release
    python3 xtask/gguf_check.py target/release/aligner tests/golden

For the golden model of every family it converts the directory to GGUF as f32 and as q8_0, reads the files with
`gguf.GGUFReader`, compares q8_0 blocks with those of `gguf.quantize`, loads the f32 file with transformers
(`gguf_file=`) where that knows the architecture, and compares its logits with those of the directory. Then it
converts the GGUF file back and loads that directory with transformers. The tokenizer is compared on a few texts.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TOKENIZER = "models/llama_gqa_tied"
TEXTS = ["Hello, world! It's 12345.", "  two  spaces\nand lines", "naïve café 数学 🦀", "<|im_start|>user\nhi<|im_end|>"]


def convert(aligner, model, out, golden, *more):
    tokenizer = ["--tokenizer", golden / TOKENIZER] if model.is_dir() else []
    command = [aligner, "convert", model, "-o", out, *tokenizer, *more]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else None


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits[0]


def load(place, **more):
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="eager", **more)


def check_tensors(whole, packed):
    """Every q8_0 tensor against what the package makes of the f32 one."""
    plain = {tensor.name: tensor for tensor in gguf.GGUFReader(whole).tensors}
    counts = {}
    for tensor in gguf.GGUFReader(packed).tensors:
        kind = tensor.tensor_type
        counts[kind.name] = counts.get(kind.name, 0) + 1
        shape = tuple(map(int, tensor.shape[::-1]))
        values = plain[tensor.name].data.reshape(shape)
        expected = gguf.quantize(np.ascontiguousarray(values), kind)
        assert np.array_equal(tensor.data.reshape(-1).view(np.uint8), expected.reshape(-1).view(np.uint8)), tensor.name
        assert tensor.data_offset % 32 == 0, tensor.name
    return counts


def check(aligner, model, golden, scratch):
    whole, packed, back = scratch / "whole.gguf", scratch / "packed.gguf", scratch / "back"
    refused = convert(aligner, model, whole, golden, "--to", "gguf", "--dtype", "f32")
    if refused:
        return f"refused: {refused}"
    assert not convert(aligner, model, packed, golden, "--to", "gguf", "--dtype", "q8_0")
    said = [f"{key} {count}" for key, count in check_tensors(whole, packed).items()]
    ids = torch.randint(3, 300, (1, 13), generator=torch.Generator().manual_seed(1))
    expected = logits(load(model), ids)
    try:
        # Of windows, scales and caps, transformers reads none: they are the directory's. Mistral is a Llama to it, so
        # that is compared within the window.
        own = AutoConfig.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        is_llama = own.model_type == "mistral"
        config = {} if is_llama else {"config": own}
        seen = own.sliding_window if is_llama else ids.shape[1]
        read = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=whole.name, dtype=torch.float32, **config)
        said.append(f"gguf_file {(logits(read, ids[:, :seen]) - expected[:seen]).abs().max():.1e}")
    except (ValueError, KeyError, NotImplementedError, AttributeError, RuntimeError) as error:
        said.append(f"gguf_file not read by transformers ({str(error).splitlines()[0][:70]})")
    refused = convert(aligner, whole, back, golden, "--dtype", "f32")
    assert not refused, refused
    said.append(f"back {(logits(load(back), ids) - expected).abs().max():.1e}")
    return ", ".join(said)


def check_tokenizer(aligner, golden, scratch):
    model = golden / TOKENIZER
    assert not convert(aligner, model, scratch / "whole.gguf", golden, "--to", "gguf", "--dtype", "f32")
    own = AutoTokenizer.from_pretrained(model)
    read = AutoTokenizer.from_pretrained(scratch, gguf_file="whole.gguf")
    for text in TEXTS:
        one, other = (tokenizer(text, add_special_tokens=False).input_ids for tokenizer in (own, read))
        assert one == other, (text, one, other)
    return f"tokenizer: {len(TEXTS)} texts are the same tokens"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("aligner", type=Path)
    parser.add_argument("golden", type=Path)
    arguments = parser.parse_args()
    aligner, golden = arguments.aligner.resolve(), arguments.golden.resolve()
    for model in sorted((golden / "models").iterdir()):
        if not (model / "config.json").is_file():
            continue
        if "CausalLM" not in json.loads((model / "config.json").read_text())["architectures"][0] \
                and "LMHead" not in json.loads((model / "config.json").read_text())["architectures"][0]:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            print(f"{model.name}: {check(aligner, model, golden, Path(scratch))}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        print(check_tokenizer(aligner, golden, Path(scratch)))


if __name__ == "__main__":
    main()
