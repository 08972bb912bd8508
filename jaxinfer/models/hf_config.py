"""Reading a Hugging Face `config.json`: what is understood is used, inert keys are known, others refused.

Values are checked here for kind and range before anything is computed from them: they come from a file of unknown
origin, and an absurd one would first cost hours or all memory.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

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
    "use_sliding_window": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
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
# Names of activations -> ours.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Keys where null says that there is none, whatever the family's default is.
NULL_IS_NONE = frozenset(
    {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "rope_scaling"}
)
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")


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


def check_keys(hf: Mapping[str, Any], handled: Set[str]) -> None:
    """Refuses a config with keys that are neither handled, inert nor neutral, or whose values are out of range.

    Raises:
      ValueError: names every such key with its value.
    """
    check_values(hf)
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


def require(hf: Mapping[str, Any], *names: str) -> list[Any]:
    """Values of keys that must be there.

    Raises:
      ValueError: names every missing key.
    """
    missing = [name for name in names if hf.get(name) is None]
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}")
    return [hf[name] for name in names]


def with_defaults(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of its family, where a key is missing, or is null and null says nothing of its own.

    Raises ValueError as `check_values`.
    """
    check_values(hf)
    given = {k: v for k, v in hf.items() if v is not None or k not in defaults or k in NULL_IS_NONE}
    return {**defaults, **given}


def activation(hf: Mapping[str, Any]) -> str:
    """The activation of gated MLPs, a key of gated_mlp.ACTIVATIONS.

    Raises:
      ValueError: it is none that we compute.
    """
    key = "hidden_act" if hf.get("hidden_act") is not None else "hidden_activation"
    name = hf.get(key) or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{key}={shown(name)} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


# What `decoder_fields` reads.
DECODER_KEYS = frozenset(
    {
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings",
        "max_position_embeddings", "hidden_act", "hidden_activation",
    }
)  # fmt: skip


def decoder_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the Config of every dense decoder has, by name.

    Raises:
      ValueError: a key is missing.
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
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
    }
