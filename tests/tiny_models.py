"""Tiny random Llama and Qwen3 models that numpy regenerates bit for bit, and writers for their checkpoints.

The golden values in `tests/golden/tiny/` were computed by transformers from exactly these weights, so the
weights themselves need not be kept. Every value is an integer from PCG64's raw bits times one float32
constant: no transcendental function or sampling algorithm that another numpy or CPU computes differently.
(Runs under Python 3.11 too, where the oracle lives.)
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

VOCAB = 512

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN3 = _LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama_gqa": _LLAMA,
    "llama_mqa_tied": _LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama_mha": _LLAMA | {"num_key_value_heads": 4},
    "llama_head_dim24": _LLAMA | {"head_dim": 24},  # 4 x 24 is not hidden_size
    "llama_bias": _LLAMA | {"attention_bias": True},
    # wavelengths 6.3, 32 and 167 or more stand on the three branches of the rule (limits 16 and 64)
    "llama_rope_llama3": _LLAMA
    | {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    # the spelling of configs written by transformers 5: no rope_theta, no rope_scaling
    "llama_rope_linear": {k: v for k, v in _LLAMA.items() if k != "rope_theta"}
    | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "qwen3_gqa_tied": _QWEN3 | {"tie_word_embeddings": True},
    "qwen3_mqa_head_dim24": _QWEN3 | {"num_key_value_heads": 1, "head_dim": 24, "attention_bias": True},
}


def random_normal(key: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    """float32 values, about normal (a sum of four uniforms), the same everywhere for the same key."""
    n = math.prod(shape)
    raw = np.random.PCG64(zlib.crc32(key.encode())).random_raw(n)  # u64[n]
    uniforms = np.ascontiguousarray(raw, dtype="<u8").view("<u2").reshape(n, 4)
    centred = uniforms.sum(axis=1, dtype=np.int64) - 2 * 65535  # standard deviation 65536 * sqrt(4 / 12)
    scale = np.float32(std / (65536 / math.sqrt(3)))
    return (centred.astype(np.float32) * scale).reshape(shape)


def random_tokens(key: str, n: int) -> list[int]:
    """n ordinary token ids (3 and up: 0, 1, 2 are the special ones), the same everywhere for the same key."""
    return (3 + np.random.PCG64(zlib.crc32(key.encode())).random_raw(n) % (VOCAB - 3)).tolist()


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensor name -> shape, matrices as published [out, in]."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    h = config["head_dim"]
    q, kv = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "input_layernorm.weight": (d,),
            p + "post_attention_layernorm.weight": (d,),
            p + "self_attn.q_proj.weight": (q, d),
            p + "self_attn.k_proj.weight": (kv, d),
            p + "self_attn.v_proj.weight": (kv, d),
            p + "self_attn.o_proj.weight": (d, q),
            p + "mlp.gate_proj.weight": (f, d),
            p + "mlp.up_proj.weight": (f, d),
            p + "mlp.down_proj.weight": (d, f),
        }
        if config["attention_bias"]:
            for name, size in (("q", q), ("k", kv), ("v", kv), ("o", d)):
                shapes[f"{p}self_attn.{name}_proj.bias"] = (size,)
        if config["model_type"] == "qwen3":
            shapes |= {p + "self_attn.q_norm.weight": (h,), p + "self_attn.k_norm.weight": (h,)}
    return shapes


def make_tiny(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(config.json as a dict, Hugging Face name -> float32 array) of one of CONFIGS.

    Matrices have std 0.3 (so that greedy output varies), norm weights 1 + N(0, 0.3), biases std 1.5 (so large
    that leaving them out changes every token).
    """
    config = CONFIGS[name]
    weights = {}
    for tensor, shape in weight_shapes(config).items():
        value = random_normal(f"{name}/{tensor}", shape, 1.5 if tensor.endswith("bias") else 0.3)
        weights[tensor] = value + np.float32(1) if "norm" in tensor else value
    return config, weights


def checksum(weights: dict[str, np.ndarray]) -> int:
    """crc32 over names and bytes; golden files hold it, to tell a drifted generator from a wrong model."""
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32(weights[name].astype("<f4").tobytes(), zlib.crc32(name.encode(), crc))
    return crc


def write_hf(
    directory: Path, config: dict[str, Any], weights: dict[str, np.ndarray], *, num_shards: int = 1
) -> Path:
    """Writes config.json and model.safetensors, or that many shards with their index; returns the directory.

    The arrays keep their dtype (ml_dtypes.bfloat16 included)."""
    directory.mkdir(parents=True, exist_ok=True)
    # safetensors writes the buffer as it lies in memory: a transposed view would be written untransposed.
    weights = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if num_shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        shard = {name: weights[name] for name in sorted(weights)[i::num_shards]}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": sum(w.nbytes for w in weights.values())},
        "weight_map": weight_map,
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(hf_name: str) -> str:
    """model.layers.1.self_attn.q_proj.weight -> blk.1.attn_q.weight"""
    stem, kind = hf_name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[rest]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def permute_rope_rows(value: np.ndarray, num_heads: int) -> np.ndarray:
    """Row order of llama q and k in GGUF: within a head the two halves of the rotation are interleaved."""
    return (
        value.reshape(num_heads, 2, value.shape[0] // num_heads // 2, *value.shape[1:])
        .swapaxes(1, 2)
        .reshape(value.shape)
    )


def llama3_rope_factors(config: dict[str, Any]) -> np.ndarray:
    """f32[H/2]: what llama.cpp stores as rope_freqs.weight, the divisors of the plain frequencies."""
    scaling, h = config["rope_scaling"], config["head_dim"]
    wavelength = 2 * np.pi * config["rope_theta"] ** (np.arange(0, h, 2, dtype=np.float64) / h)
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (original / wavelength - low) / (high - low)
    factors = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(wavelength > original / low, factor, factors)
    factors = np.where(wavelength < original / high, 1, factors)
    return factors.astype(np.float32)


def write_gguf(
    path: Path, config: dict[str, Any], weights: dict[str, np.ndarray], *, tensor_type: str = "F32"
) -> dict[str, np.ndarray]:
    """Writes a GGUF file as llama.cpp's converter does, without a vocabulary.

    tensor_type (F32, F16, BF16, Q8_0, Q4_0, Q4_1) holds for matrices; vectors stay F32. Returns the
    float32 weights under Hugging Face names that a right reader finds in the file: dequantized by the gguf
    package, q and k rows in Hugging Face's order.
    """
    arch = config["model_type"]
    heads, kv_heads, h = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    rope = config.get("rope_parameters") or (config.get("rope_scaling") or {})
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(h)
    writer.add_value_length(h)
    writer.add_rope_dimension_count(h)
    writer.add_rope_freq_base(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_rope_factors(config))

    found = {}
    for name, value in weights.items():
        kind = gguf.GGMLQuantizationType[tensor_type if value.ndim > 1 else "F32"]
        quantized = gguf.quants.quantize(value, kind)
        found[name] = gguf.quants.dequantize(quantized, kind).astype(np.float32)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            quantized = permute_rope_rows(quantized, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(quantized), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found
