"""Shapes of models for planner tests."""

from tiny_models import CONFIGS

from jaxinfer import models
from jaxinfer.models import llama
from jaxinfer.tools.planner.shape import ModelShape


def tiny_shape(name="llama_gqa", dtype="bfloat16"):
    """One of the tiny models."""
    module = models.for_config(CONFIGS[name])
    return ModelShape.from_config(module, module.Config.from_hf(CONFIGS[name], dtype=dtype), name)


def llama_shape(layers=32, heads=32, kv_heads=32, embed=4096, mlp=11008, vocab=32000, dtype="float16"):
    """A Llama; the defaults are those of the first 7B."""
    hf = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "max_position_embeddings": 131072,
    }
    return ModelShape.from_config(llama, llama.Config.from_hf(hf, dtype))
