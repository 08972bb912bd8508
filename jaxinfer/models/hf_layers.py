"""What differs by layer in a Hugging Face config: windows, rotary embeddings, KV groups.

Read of the keys that transformers 5 uses for all families (`layer_types`, `rope_parameters` of one kind or one for each
type of layer, `no_rope_layers`, `layer_rope_theta`) and of their older spellings.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jaxinfer.models.hf_config import RANGES, Range
from jaxinfer.models.rope import RopeConfig
from jaxinfer.text.wording import listed, shown

FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers
# What `read` looks at beside hf_config.DECODER_KEYS; a model file names those that its family has.
WINDOW_KEYS = frozenset({"sliding_window", "layer_types"})

_FACTOR = Range(1e-3, 1e6, whole=False)
ROPE_RANGES: dict[str, Range] = {
    "rope_theta": RANGES["rope_theta"],
    "factor": _FACTOR,
    "low_freq_factor": _FACTOR,
    "high_freq_factor": _FACTOR,
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "mscale": Range(0, 1e3, whole=False),
    "mscale_all_dim": Range(0, 1e3, whole=False),
    "attention_factor": Range(1e-3, 1e3, whole=False),
    "partial_rotary_factor": Range(1e-3, 1, whole=False),
    "llama_4_scaling_beta": Range(0, 1e3, whole=False),
    "original_max_position_embeddings": RANGES["max_position_embeddings"],
}
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
# rope_type -> the keys that it must have, and those that it may have
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (("factor", "original_max_position_embeddings"), _YARN),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "proportional": ((), ("factor", "partial_rotary_factor")),
    "factors": (("factors",), ()),  # ours, of GGUF files
}
SUPPORTED_ROPES = tuple(kind for kind in ROPE_KEYS if kind != "factors")
# Keys of any kind, of families whose model files name them.
FAMILY_ROPE_KEYS = {"partial_rotary_factor", "llama_4_scaling_beta"}
# The lengths are read by the kinds that have them, and say nothing to the others.
INERT_ROPE_KEYS = {"original_max_position_embeddings", "max_position_embeddings"}


@dataclass(frozen=True)
class LayerAttention:
    """Of a layer its window, KV group, and index of its rope, as `AttentionOptions` has them."""

    window: int | None
    group: int
    rope: int | None


def read(
    hf: Mapping[str, Any], num_layers: int, head_dim: int, keys: Set[str] = frozenset()
) -> tuple[tuple[RopeConfig, ...], tuple[LayerAttention, ...]]:
    """(the ropes of a model, the attention of each layer).

    keys: those of FAMILY_ROPE_KEYS that the family has.

    Raises:
      ValueError: a type of layer or a kind of rope is not one that we compute, or a value is out of range.
    """
    types = layer_types(hf, num_layers)
    window = None if hf.get("use_sliding_window") is False else hf.get("sliding_window")
    if window is not None and window >= (hf.get("max_position_embeddings") or math.inf):
        window = None  # it covers every position
    windows = [window if kind == SLIDING else None for kind in types]
    groups = sorted(set(windows), key=lambda w: (w is not None, w))
    ropes: dict[RopeConfig, int] = {}
    attention = []
    for i, kind in enumerate(types):
        rope = _rope_of_layer(hf, i, kind, head_dim, keys)
        index = None if rope is None else ropes.setdefault(rope, len(ropes))
        attention.append(LayerAttention(windows[i], groups.index(windows[i]), index))
    return tuple(ropes), tuple(attention)


def layer_types(hf: Mapping[str, Any], num_layers: int) -> Sequence[str]:
    """FULL or SLIDING for each layer: `layer_types`, or all that `sliding_window` says.

    Raises ValueError.
    """
    types = hf.get("layer_types")
    if types is None:
        return [FULL if hf.get("sliding_window") is None else SLIDING] * num_layers
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries for {num_layers} layers")
    unknown = sorted({shown(kind) for kind in types if kind not in (FULL, SLIDING)})
    if unknown:
        raise ValueError(f"layer_types {listed(unknown)} are not supported; supported are {FULL}, {SLIDING}")
    if SLIDING in types and hf.get("sliding_window") is None:
        raise ValueError(f"layer_types has {SLIDING} layers, and sliding_window is missing")
    return list(types)


def longest(ropes: Sequence[RopeConfig], max_position_embeddings: int) -> int:
    """Tokens of the longest text: kinds of rope that stretch a context beyond the given one are counted in."""
    lengths = [max_position_embeddings]
    for rope in ropes:
        if rope.kind in ("yarn", "dynamic"):
            lengths.append(int(rope.original_max_position * rope.factor))
    return max(lengths)


def _per_layer(hf: Mapping[str, Any], key: str, layer: int) -> Any:
    """An entry of a list with one for each layer, or None where there is no list. Raises ValueError."""
    values = hf.get(key)
    if values is None:
        return None
    if not isinstance(values, list | tuple) or len(values) < hf["num_hidden_layers"]:
        raise ValueError(f"{key} is {shown(values)}, not a list with an entry for each layer")
    value = values[layer]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e15:
        raise ValueError(f"{key} holds {shown(value)}, which is no number from 0 to 1e15")
    return value


def _rope_of_layer(
    hf: Mapping[str, Any], layer: int, kind: str, head_dim: int, keys: Set[str]
) -> RopeConfig | None:
    """None: the layer's heads are not turned."""
    if _per_layer(hf, "no_rope_layers", layer) == 0:  # the list says which layers have rope
        return None
    theta = _per_layer(hf, "layer_rope_theta", layer)
    if theta == 0:
        return None
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        if not isinstance(parameters.get(kind), dict):
            raise ValueError(f"rope_parameters has no entry for layers of type {kind}")
        parameters = parameters[kind]
    if theta is not None:
        parameters = {**parameters, "rope_theta": theta}
    return rope_from_hf(parameters, hf, head_dim, keys)


def rope_from_hf(
    parameters: Mapping[str, Any], hf: Mapping[str, Any], head_dim: int, keys: Set[str] = frozenset()
) -> RopeConfig:
    """RopeConfig from `rope_parameters` (those of one type of layer), and what else of a config they lean on.

    Raises:
      ValueError: the kind, or a key of it, is not one we compute, or a value is out of range.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    kind = "longrope" if kind == "su" else kind  # its first name
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ValueError(
            f"rope scaling of type {shown(kind)} is not supported; supported are {', '.join(SUPPORTED_ROPES)}"
        )
    for key in ("rope_theta", "partial_rotary_factor"):
        if hf.get(key) is not None:
            given.setdefault(key, hf[key])
    if given.get("partial_rotary_factor") == 1:
        del given["partial_rotary_factor"]
    required, optional = ROPE_KEYS[kind]
    if "original_max_position_embeddings" in required:
        given = {"original_max_position_embeddings": hf.get("max_position_embeddings")} | given
        if hf.get("original_max_position_embeddings") is not None:
            given["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    if kind == "default" and given.get("factor") == 1:
        del given["factor"]
    _check_rope(kind, given, {*required, *optional, "rope_theta", *(FAMILY_ROPE_KEYS & keys)})
    return RopeConfig(**_rope_fields(kind, given, hf, head_dim))


def _check_rope(kind: str, given: Mapping[str, Any], keys: set[str]) -> None:
    """Raises ValueError where keys are missing or not understood, or values are out of range."""
    missing = [key for key in ROPE_KEYS[kind][0] if given.get(key) is None]
    unknown = set(given) - keys - INERT_ROPE_KEYS
    if unknown or missing:
        raise ValueError(
            f"rope scaling {kind!r}: missing keys [{listed(sorted(missing))}], keys not understood "
            f"[{listed(sorted(unknown))}]"
        )
    for key, bounds in ROPE_RANGES.items():
        if given.get(key) is not None and (problem := bounds.problem(given[key])):
            raise ValueError(f"rope scaling {kind!r}: {key} {problem}")
    if not isinstance(given.get("truncate", True), bool):
        raise ValueError(f"rope scaling {kind!r}: truncate is {shown(given['truncate'])}, not true or false")
    if kind == "llama3" and not given["low_freq_factor"] < given["high_freq_factor"]:
        raise ValueError("rope scaling 'llama3': low_freq_factor must be under high_freq_factor")


def _rope_fields(kind: str, given: Mapping[str, Any], hf: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    partial = float(given.get("partial_rotary_factor", 1.0))
    same_name = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
    fields: dict[str, Any] = {key: given[key] for key in same_name if key in given}
    fields |= {"theta": float(given.get("rope_theta", 10000.0)), "head_dim": head_dim, "kind": kind}
    fields |= {"partial": partial, "query_scale_beta": float(given.get("llama_4_scaling_beta", 0.0))}
    pairs = head_dim // 2 if kind == "proportional" else int(head_dim * partial) // 2
    if int(head_dim * partial) % 2 or pairs < 1:
        raise ValueError(
            f"partial_rotary_factor {partial} of head_dim {head_dim} is no whole number of pairs"
        )
    longest_text = hf.get("max_position_embeddings") or 2048
    if "original_max_position_embeddings" in ROPE_KEYS[kind][0] or fields["query_scale_beta"]:
        fields["original_max_position"] = given["original_max_position_embeddings"]
    if kind == "dynamic":
        fields["original_max_position"] = longest_text
        fields["context"] = int(longest_text * given["factor"])
    elif kind == "yarn":
        fields["attention_factor"] = _yarn_attention_factor(given)
    elif kind == "longrope":
        ratio = given.get("factor") or longest_text / given["original_max_position_embeddings"]
        fields["attention_factor"] = given.get("attention_factor") or _longrope_attention_factor(
            ratio, given["original_max_position_embeddings"]
        )
        fields["context"] = longest_text
        fields["factors"] = _factors("long_factor", given["long_factor"], pairs)
        fields["short_factors"] = _factors("short_factor", given["short_factor"], pairs)
        fields.pop("factor", None)
    elif kind == "factors":
        fields["factors"] = _factors("factors", given["factors"], pairs)
    return fields


def _yarn_attention_factor(given: Mapping[str, Any]) -> float:
    """The temperature of attention (Peng et al., 2023, equation 22), where the config does not say it."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def at(mscale: float) -> float:
        return 1.0 if given["factor"] <= 1 else 0.1 * mscale * math.log(given["factor"]) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return at(given["mscale"]) / at(given["mscale_all_dim"])
    return at(1.0)


def _longrope_attention_factor(ratio: float, original: int) -> float:
    return 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))


def _factors(name: str, factors: Any, pairs: int) -> tuple[float, ...]:
    """Divisors of the rope frequencies. Raises ValueError: not one for each pair, or not over 0."""
    if not isinstance(factors, list | tuple) or len(factors) != pairs:
        raise ValueError(
            f"rope scaling: {name} is {shown(factors)}, not a list of {pairs} numbers, one for each pair that turns"
        )
    wrong = [
        x for x in factors if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < math.inf
    ]
    if wrong:
        raise ValueError(f"rope scaling: {name} holds {shown(wrong[0])}; each must be a number over 0")
    return tuple(float(x) for x in factors)
