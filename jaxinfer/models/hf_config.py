"""Reading a Hugging Face `config.json`: what is understood is used, inert keys are known, others refused.

Values are checked here for kind and range before anything is computed from them: they come from a file of unknown
origin, and an absurd one would first cost hours or all memory.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.models.layers import RopeConfig
from jaxinfer.text.wording import listed, named, shown

# Why keys change nothing of what inference computes, whatever their value -> those keys.
INERT_KEYS_BY_REASON: dict[str, tuple[str, ...]] = {
    "where the model came from, or what wrote the file": (
        "_commit_hash", "_name_or_path", "_model_name_or_path", "model_name", "name_or_path", "architectures",
        "transformers_version", "transformers.js_config", "unsloth_fixed", "unsloth_version", "is_llama_config",
    ),
    "code that comes with a checkpoint, which is never run": ("auto_map", "custom_pipelines"),
    "read elsewhere: the kind of model by jaxinfer.models, end ids by the readers of files": (
        "model_type", "eos_token_id",
    ),
    "ids that only the tokenizer's own files decide": (
        "bos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "mask_token_id", "cls_token_id",
        "decoder_start_token_id", "tokenizer_class",
    ),
    "dtype of the published weights, which their file says itself": ("dtype", "torch_dtype", "use_bfloat16"),
    "how transformers computes the same": (
        "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
        "_flash_attn_2_enabled", "_experts_implementation", "attn_implementation", "torchscript",
        "chunk_size_feed_forward",
        "use_cache", "rope_interleaved",  # the last: llama.cpp's converter; safetensors keep the halves
    ),
    "what transformers returns beside logits": (
        "output_attentions", "output_hidden_states", "return_dict", "use_return_dict", "keys_to_ignore_at_inference",
        "output_scores", "return_dict_in_generate",
    ),
    "training alone": (
        "attention_dropout", "attn_pdrop", "classifier_dropout", "dropout", "embd_pdrop", "hidden_dropout",
        "hidden_dropout_prob", "resid_pdrop", "initializer_range", "initializer_factor", "gradient_checkpointing",
        "router_aux_loss_coef", "use_liger_kernel",
    ),
    "heads for other tasks, which the loader refuses by their tensors": (
        "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task", "prefix",
    ),
    "encoders and decoders that attend across, which no model here has": (
        "is_decoder", "is_encoder_decoder", "cross_attention_hidden_size", "tie_encoder_decoder",
    ),
    "acts only together with use_sliding_window, which is refused": ("max_window_layers",),
    "limits of the tokenizer or of training; max_position_embeddings is the model's": (
        "max_sequence_length", "max_seq_length", "max_seq_len", "model_max_length", "tokenizer_model_max_length",
        "seq_length",
    ),
    "defaults of sampling: act like those of generation_config.json where that file is missing": (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens",
    ),
    "of generate() in transformers; transformers itself writes the defaults of all into old files": (
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
        "num_beam_groups", "num_beams", "num_return_sequences", "remove_invalid_values", "suppress_tokens",
        "typical_p",
    ),
}  # fmt: skip
INERT_KEYS = frozenset(key for keys in INERT_KEYS_BY_REASON.values() for key in keys)

# Keys that are harmless only at these values: anything else changes the mathematics.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "hidden_act": ("silu", "swish", None),  # two names of one function
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "quantization_config": (None, {}),
    "add_cross_attention": (False, None),
    "text_config": (None, {}),
    "vision_config": (None, {}),
    "pruned_heads": (None, {}),
    "mlp_only_layers": (None, []),
    "rope_scaling": (None, {}),
    "layer_types": (None,),
}


@dataclass(frozen=True)
class Range:
    """What a number of a config may be: both ends included, whole or not."""

    low: float
    high: float
    whole: bool = True

    def problem(self, value: Any) -> str | None:
        """Why `value` is none of it, or None."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return f"is {shown(value)}, not a{' whole' if self.whole else ''} number"
        if not self.low <= value <= self.high:  # false for NaN
            return f"is {shown(value)}, not from {self.low:,} to {self.high:,}"
        return None


# Far over what any published model has: above them nothing is computed or allocated.
RANGES: dict[str, Range] = {
    "vocab_size": Range(1, 1 << 24),
    "hidden_size": Range(1, 1 << 20),
    "intermediate_size": Range(1, 1 << 22),
    "num_hidden_layers": Range(1, 1024),
    "num_attention_heads": Range(1, 4096),
    "num_key_value_heads": Range(1, 4096),
    "head_dim": Range(2, 4096),
    "max_position_embeddings": Range(1, (1 << 31) - 1),
    "sliding_window": Range(1, (1 << 31) - 1),
    "rms_norm_eps": Range(0, 1, whole=False),
    "rope_theta": Range(1e-3, 1e15, whole=False),
}
ROPE_RANGES: dict[str, Range] = {
    "rope_theta": RANGES["rope_theta"],
    "factor": Range(1e-3, 1e6, whole=False),
    "low_freq_factor": Range(1e-3, 1e6, whole=False),
    "high_freq_factor": Range(1e-3, 1e6, whole=False),
    "original_max_position_embeddings": RANGES["max_position_embeddings"],
}
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
# transformers takes a window of this many tokens for a config of this model_type that has no such key.
DEFAULT_WINDOWS = {"mistral": 4096}


def check_values(hf: Mapping[str, Any]) -> None:
    """Checks kind and range of every number and flag that is read of a config; keys may be missing.

    Raises:
      ValueError: names the first key that is wrong, its value and what it may be.
    """
    for key, bounds in RANGES.items():
        if hf.get(key) is not None and (problem := bounds.problem(hf[key])):
            raise ValueError(f"{key} {problem}")
    for key in FLAGS:
        if not isinstance(hf.get(key), bool | None):
            raise ValueError(f"{key} is {shown(hf[key])}, not true or false")
    for key in ("rope_scaling", "rope_parameters", "text_config"):
        if not isinstance(hf.get(key), dict | None):
            raise ValueError(f"{key} is {shown(hf[key])}, not an object")
    if not isinstance(hf.get("layer_types"), list | None):
        raise ValueError(f"layer_types is {shown(hf['layer_types'])}, not a list")
    heads, kv_heads, head_dim = (
        hf.get(k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if head_dim and head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; rotary embedding turns pairs")
    if not head_dim and heads and hf.get("hidden_size") and hf["hidden_size"] < 2 * heads:
        raise ValueError(f"hidden_size {hf['hidden_size']} is too small for {heads} attention heads")


def check_keys(hf: dict[str, Any], handled: frozenset[str]) -> None:
    """Refuses a config with keys that are neither handled, inert nor neutral, or whose values are out of range.

    Raises:
      ValueError: names every such key with its value.
    """
    check_values(hf)
    window = DEFAULT_WINDOWS.get(str(hf.get("model_type")))
    if "sliding_window" not in hf and window is not None and not _is_no_window(window, hf):
        raise ValueError(
            f"config of model_type {hf['model_type']!r} without sliding_window has a window of {window}, which is not "
            'supported; write "sliding_window": null if the model has none'
        )
    refused = [
        f"{named(key, 60)}={shown(value)}"
        for key, value in hf.items()
        if key not in handled and key not in INERT_KEYS and not _is_neutral(key, value, hf)
    ]
    if refused:
        raise ValueError(
            f"config of model_type {hf.get('model_type')!r} has keys that this model file does not handle: "
            f"{listed(refused)}; remove them if they are inert, or add them to the model file"
        )


def _is_neutral(key: str, value: Any, hf: Mapping[str, Any]) -> bool:
    if key == "sliding_window":  # Qwen writes a window that it then switches off
        return value is None or not hf.get("use_sliding_window", True) or _is_no_window(value, hf)
    if key == "layer_types" and value is not None:
        return all(kind == "full_attention" for kind in value)
    return key in NEUTRAL_VALUES and value in NEUTRAL_VALUES[key]


def _is_no_window(window: int, hf: Mapping[str, Any]) -> bool:
    """Whether a window of so many tokens covers every position that the model can have."""
    longest = hf.get("max_position_embeddings")
    return longest is not None and window >= longest


def require(hf: dict[str, Any], *names: str) -> list[Any]:
    """Values of keys that must be there.

    Raises:
      ValueError: names every missing key.
    """
    missing = [name for name in names if hf.get(name) is None]
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}")
    return [hf[name] for name in names]


# rope_type -> its keys in a config and their fields of RopeConfig.
ROPE_KEYS: dict[str, dict[str, str]] = {
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


def rope_from_hf(hf: dict[str, Any], head_dim: int) -> RopeConfig:
    """RopeConfig from `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`.

    Raises:
      ValueError: the kind of scaling, or a key of it, is not one we compute, or a value is out of range.
    """
    scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ValueError(
            f"rope scaling of type {shown(kind)} is not supported; supported are default, linear and llama3"
        )
    keys = ROPE_KEYS[kind]
    for key, bounds in ROPE_RANGES.items():
        if scaling.get(key) is not None and (problem := bounds.problem(scaling[key])):
            raise ValueError(f"rope scaling {kind!r}: {key} {problem}")
    theta = float(scaling.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
    if scaling.get("partial_rotary_factor", 1) in (1, None):  # all of a head turns
        scaling.pop("partial_rotary_factor", None)
    if (
        "original_max_position_embeddings" not in keys
    ):  # of the training; read by the kinds that have it alone
        scaling.pop("original_max_position_embeddings", None)
    if kind == "default" and scaling.get("factor", 1) in (1, None):
        scaling.pop("factor", None)
    unknown, missing = set(scaling) - set(keys), {key for key in keys if scaling.get(key) is None}
    if unknown or missing:
        raise ValueError(
            f"rope scaling {kind!r}: missing keys [{listed(sorted(missing))}], keys not understood "
            f"[{listed(sorted(unknown))}]"
        )
    fields = {keys[key]: value for key, value in scaling.items()}
    if kind == "llama3" and not fields["low_freq_factor"] < fields["high_freq_factor"]:
        raise ValueError("rope scaling 'llama3': low_freq_factor must be under high_freq_factor")
    if "factors" in fields:
        fields["factors"] = _factors(fields["factors"], head_dim)
    return RopeConfig(theta=theta, head_dim=head_dim, kind=kind, **fields)


def _factors(factors: Any, head_dim: int) -> tuple[float, ...]:
    """Divisors of the rope frequencies. Raises ValueError: not one for each pair of a head, or not over 0."""
    if not isinstance(factors, list | tuple) or len(factors) != head_dim // 2:
        raise ValueError(
            f"rope factors are {shown(factors)}, not a list of head_dim / 2 = {head_dim // 2} numbers"
        )
    wrong = [
        x for x in factors if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < math.inf
    ]
    if wrong:
        raise ValueError(f"rope factors hold {shown(wrong[0])}; each must be a number over 0")
    return tuple(float(x) for x in factors)


# What `decoder_fields` reads.
DECODER_KEYS = frozenset(
    {
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings",
        "max_position_embeddings",
    }
)  # fmt: skip


def decoder_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Fields that the Config of every dense decoder has, by name.

    Raises:
      ValueError: a key is missing, or the scaling of rope is none that we compute.
    """
    vocab, dim, depth, heads, mlp = require(
        hf, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    )
    head_dim = hf.get("head_dim") or dim // heads
    return {
        "vocab_size": vocab,
        "embed_dim": dim,
        "num_layers": depth,
        "num_q_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "mlp_dim": mlp,
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
        "rope": rope_from_hf(hf, head_dim),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
    }
