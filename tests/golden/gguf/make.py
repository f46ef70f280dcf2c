"""Makes the golden files of this directory with the `gguf` package (see README.md)."""

import hashlib
import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from safetensors.numpy import save_file

HERE = Path(__file__).parent
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LAYERS = 32, 4, 2, 8, 64, 40, 2


def half(rng, count):
    """`count` half-precision scales as bytes, positive and negative."""
    return rng.uniform(-0.05, 0.05, (count, 1)).astype(np.float16).view(np.uint8)


def random_block(kind, rng, count=2):
    """Blocks of random bits whose scales are ordinary numbers."""
    blocks = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    scales_at = {T.Q4_0: [0], T.Q5_0: [0], T.Q8_0: [0], T.Q4_1: [0, 2], T.Q5_1: [0, 2],
                 T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
                 T.Q2_K: [80, 82], T.Q3_K: [108]}
    for at in scales_at[kind]:
        blocks[:, at:at + 2] = half(rng, count)
    return blocks


def make_blocks():
    rng = np.random.default_rng(0)
    cases = []
    for kind in [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K, T.Q2_K, T.Q3_K]:
        blocks = random_block(kind, rng)
        values = gguf.dequantize(blocks, kind).astype("<f4")
        cases.append({"type": kind.name, "bytes": blocks.tobytes().hex(), "f32": values.tobytes().hex()})
    (HERE / "blocks.json").write_text(json.dumps(cases, indent=1) + "\n")


def interleave(weights, heads):
    """Hugging Face's rows to GGUF's, as llama.cpp's converter permutes them."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))


def half_split(weights, heads):
    """The inverse of `interleave`."""
    split = weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))


def rope_divisors(theta, factor, low, high, original):
    wavelengths = 2 * np.pi * theta ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < original / high, 1,
                    np.where(wavelengths > original / low, factor, between)).astype(np.float32)


def make_model():
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(HERE / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_scores([-0.5 * i for i in range(VOCAB)])
    for name, value in [("uint8", 200), ("int8", -100), ("uint16", 60000), ("int16", -30000),
                        ("uint32", 4000000000), ("int32", -2000000000), ("uint64", 1 << 40),
                        ("int64", -(1 << 40)), ("float32", 0.5), ("float64", 0.1), ("bool", True)]:
        getattr(writer, f"add_{name}")(f"golden.{name}", value)
    writer.add_string("golden.string", "grüße")
    writer.add_array("golden.nested", [[1, 2], [3]])
    writer.add_array("golden.flags", [True, False])

    expected = {}

    def add(stored, hub, shape, kind, heads=None):
        values = rng.standard_normal(shape).astype(np.float32)
        data = gguf.quantize(values, kind)
        writer.add_tensor(stored, data, raw_dtype=kind)
        plain = gguf.dequantize(data, kind).reshape(shape)
        expected[hub] = half_split(plain, heads) if heads else plain

    add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN), T.F16)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), T.F32)
    add("output.weight", "lm_head.weight", (VOCAB, HIDDEN), T.F32)
    writer.add_rope_scaling_orig_ctx_len(1024)
    divisors = rope_divisors(10000.0, 8.0, 1.0, 4.0, 1024)
    writer.add_tensor("rope_freqs.weight", divisors)
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        stored, hub = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{stored}.attn_norm.weight", f"{hub}.input_layernorm.weight", (HIDDEN,), T.F32)
        add(f"{stored}.ffn_norm.weight", f"{hub}.post_attention_layernorm.weight", (HIDDEN,), T.F32)
        for name, target, shape, kind, heads in [
            ("attn_q", "self_attn.q_proj", (query, HIDDEN), T.Q8_0, HEADS),
            ("attn_k", "self_attn.k_proj", (key, HIDDEN), T.Q4_1, KV_HEADS),
            ("attn_v", "self_attn.v_proj", (key, HIDDEN), T.Q5_0, None),
            ("attn_output", "self_attn.o_proj", (HIDDEN, query), T.BF16, None),
            ("ffn_gate", "mlp.gate_proj", (MLP, HIDDEN), T.Q4_0, None),
            ("ffn_up", "mlp.up_proj", (MLP, HIDDEN), T.Q5_1, None),
            ("ffn_down", "mlp.down_proj", (HIDDEN, MLP), T.F16, None),
        ]:
            add(f"{stored}.{name}.weight", f"{hub}.{target}.weight", shape, kind, heads)
            if name.startswith("attn"):
                add(f"{stored}.{name}.bias", f"{hub}.{target}.bias", shape[:1], T.F32, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(expected, HERE / "tiny.safetensors")
    one = rng.standard_normal((query, HIDDEN)).astype(np.float32)
    assert (half_split(interleave(one, HEADS), HEADS) == one).all()


def make_hashes(path):
    """SHA-256 of every dequantised tensor of a real file, rows in Hugging Face's order."""
    reader = gguf.GGUFReader(path)
    heads = {"attn_q.weight": int(reader.get_field("llama.attention.head_count").contents()),
             "attn_k.weight": int(reader.get_field("llama.attention.head_count_kv").contents())}
    hashes = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1]).astype("<f4")
        for suffix, count in heads.items():
            if tensor.name.endswith(suffix):
                values = half_split(values, count)
        hashes[tensor.name] = {"shape": list(map(int, values.shape)),
                               "sha256": hashlib.sha256(values.tobytes()).hexdigest()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in hashes.items())
    (HERE / "smollm2.json").write_text("{\n" + lines + "\n}\n")


make_blocks()
make_model()
if len(sys.argv) > 1:
    make_hashes(sys.argv[1])
