"""Reading a Hugging Face `config.json`: what is understood is used, inert keys are known, others refused."""

from typing import Any

from jaxinfer.models.layers import RopeConfig

# Keys that do not change what inference computes, whatever their value.
INERT_KEYS = frozenset(
    {
        "_model_name_or_path", "_name_or_path", "architectures", "attention_dropout", "auto_map",
        "bos_token_id", "dtype",
        "eos_token_id", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder",
        "is_llama_config",
        "label2id", "max_window_layers", "model_type", "name_or_path", "output_attentions",
        "output_hidden_states", "pad_token_id", "return_dict", "rope_interleaved", "torch_dtype",
        "transformers.js_config", "transformers_version", "unsloth_fixed", "use_cache", "tokenizer_class",
        "task_specific_params", "problem_type", "chunk_size_feed_forward", "finetuning_task", "prefix",
        "sep_token_id", "decoder_start_token_id", "cross_attention_hidden_size", "tie_encoder_decoder",
        "torchscript", "unk_token_id", "use_bfloat16",
    }
)  # fmt: skip

# Keys that are harmless only at this value: anything else changes the mathematics.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "hidden_act": ("silu", None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (1, 1.0, None),
    "embedding_multiplier": (1, 1.0, None),
    "residual_multiplier": (1, 1.0, None),
    "quantization_config": (None,),
    "add_cross_attention": (False, None),
}


def check_keys(hf: dict[str, Any], handled: frozenset[str]) -> None:
    """Refuse a config with keys that are neither handled, inert nor neutral.

    Raises:
      ValueError: names every such key with its value.
    """
    refused = []
    for key, value in hf.items():
        if key in handled or key in INERT_KEYS:
            continue
        if key == "sliding_window" and not hf.get("use_sliding_window", True):
            continue  # Qwen writes a window that it then switches off.
        if key == "layer_types" and all(kind == "full_attention" for kind in value or ()):
            continue
        if key in NEUTRAL_VALUES and value in NEUTRAL_VALUES[key]:
            continue
        refused.append(f"{key}={value!r}")
    if refused:
        raise ValueError(
            f"config of model_type {hf.get('model_type')!r} has keys that this model file does not handle: "
            f"{', '.join(refused)}; remove them if they are inert, or add them to the model file"
        )


def require(hf: dict[str, Any], *names: str) -> list[Any]:
    """Values of keys that must be there.

    Raises:
      ValueError: names every missing key.
    """
    missing = [name for name in names if hf.get(name) is None]
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}")
    return [hf[name] for name in names]


def rope_from_hf(hf: dict[str, Any], head_dim: int) -> RopeConfig:
    """RopeConfig from `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`.

    Raises:
      ValueError: the kind of scaling, or a key of it, is not one we compute.
    """
    scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    known = {
        "default": {},
        "linear": {"factor": "factor"},
        "llama3": {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_position",
        },
        "factors": {"factors": "factors"},
    }
    if kind not in known:
        raise ValueError(
            f"rope scaling of type {kind!r} is not supported; supported are default, linear and llama3"
        )
    unknown = set(scaling) - set(known[kind])
    missing = set(known[kind]) - set(scaling)
    if unknown or missing:
        raise ValueError(
            f"rope scaling {kind!r}: missing keys {sorted(missing)}, keys not understood {sorted(unknown)}"
        )
    fields = {known[kind][key]: value for key, value in scaling.items()}
    if "factors" in fields:
        fields["factors"] = tuple(float(x) for x in fields["factors"])
    return RopeConfig(theta=theta, head_dim=head_dim, kind=kind, **fields)
