"""A `tokenizers.Tokenizer` from the metadata of a GGUF file.

Two kinds are built: byte-level BPE (`tokenizer.ggml.model` = "gpt2") and SentencePiece BPE with byte fallback
("llama"). Text is cut and joined as llama.cpp does it (src/llama-vocab.cpp), which is what the file was
written for. Any other kind or pre-tokenizer is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.checkpoints.token_ids import valid_id
from jaxinfer.checkpoints.tokenizer_json import library_errors
from jaxinfer.text.wording import shown

SPACE = "\u2581"  # SentencePiece's visible space
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # in tokenizer.ggml.token_type, SentencePiece's numbers

# Characters of a token that others are merged to; every cut of it is looked at. SentencePiece's trainer stops at 16.
MAX_PIECE = 256

_KIND_NAMES: dict[type, str] = {str: "text", int: "whole numbers", float: "numbers", bool: "true or false"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# `tokenizer.ggml.pre` -> the expressions that cut the text, one after the other.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
# Vocabularies in which a whole word that is a token is taken without merging.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
# Byte-level vocabularies that add BOS unless the file says otherwise.
_ADDS_BOS = {"llama-bpe", "llama3", "llama-v3"}


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that the `tokenizer.ggml.*` keys describe.

    Raises ValueError for a file without a vocabulary, a kind or pre-tokenizer that is not supported, values of
    another kind than their key has, arrays whose lengths disagree, and special ids outside the vocabulary.
    """
    with library_errors("tokenizer.ggml.*"):
        return _build(metadata)


def _build(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = _typed(metadata, "model", str)
    tokens = _typed(metadata, "tokens", str, many=True)
    if kind is None or tokens is None:
        raise ValueError("the GGUF file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
    token_types = _typed(metadata, "token_type", int, many=True) or [NORMAL] * len(tokens)
    if len(token_types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(token_types)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        repeated = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise ValueError(f"tokenizer.ggml.tokens holds {shown(repeated)} more than once")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, tokens, token_types), True
    else:
        raise ValueError(f"tokenizer.ggml.model {shown(kind)} is not supported; supported: 'gpt2', 'llama'")

    # Both are found in the text before it is cut; only the control tokens are hidden from output.
    for token_type, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, type_ in zip(tokens, token_types, strict=True)
            if type_ == token_type and token
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    add_bos, add_eos = _typed(metadata, "add_bos_token", bool), _typed(metadata, "add_eos_token", bool)
    bos, eos = special_token(metadata, "bos"), special_token(metadata, "eos")
    wants_bos = adds_bos if add_bos is None else add_bos
    set_added_ends(tokenizer, bos=bos if wants_bos else None, eos=eos if add_eos else None)
    return tokenizer


def _typed(metadata: Mapping[str, Any], name: str, kind: type, many: bool = False) -> Any:
    """The value of `tokenizer.ggml.{name}`, or None. Raises ValueError for one (or an entry) of another kind."""
    value = metadata.get(f"tokenizer.ggml.{name}")
    accepted = (int, float) if kind is float else (kind,)
    if value is None or (not many and isinstance(value, kind)):
        return value
    # `type`, since True is an int for isinstance
    wrong = [x for x in value if type(x) not in accepted] if many and isinstance(value, list) else [value]
    if wrong:
        what = f"{'a list of ' if many else ''}{_KIND_NAMES[kind]}"
        raise ValueError(f"tokenizer.ggml.{name} is {what}, and this one holds {shown(wrong[0])}")
    return value


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """`tokenizer.ggml.{name}_token_id`, or None where the file does not name one (-1 is none too).

    Raises ValueError for what is no id, or outside the vocabulary.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    return valid_id(metadata.get(key), key, len(metadata["tokenizer.ggml.tokens"]))


def special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of `special_id`, or None."""
    id_ = special_id(metadata, name)
    return None if id_ is None else metadata["tokenizer.ggml.tokens"][id_]


def set_added_ends(tokenizer: Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Makes `encode` put `bos` before and `eos` behind the text (None: nothing there)."""
    ends = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    single = [token for token in (bos, "$A", eos) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether such a vocabulary adds BOS where the file is silent."""
    pre = _typed(metadata, "pre", str) or "default"
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre {shown(pre)} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [_merge(merge) for merge in _typed(metadata, "merges", str, many=True) or ()]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    cuts: list[Any] = [
        pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in PRE_TOKENIZERS[pre]
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in _ADDS_BOS


def _merge(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right) or " " in right:
        raise ValueError(
            f"tokenizer.ggml.merges holds {shown(merge)}, which is not two tokens with a space between"
        )
    return left, right


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], token_types: Sequence[int]
) -> Tokenizer:
    """SentencePiece BPE: the scores of whole tokens become an ordered list of merges."""
    scores = _typed(metadata, "scores", float, many=True)
    if scores is None or len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores must have one entry for each of the {len(tokens)} tokens")
    if any(score != score for score in scores):
        raise ValueError("tokenizer.ggml.scores holds NaN, by which nothing can be ordered")
    vocab = {token: index for index, token in enumerate(tokens)}
    if "<0x00>" not in vocab:
        raise ValueError("a 'llama' tokenizer without byte tokens (<0x00> to <0xFF>) is not supported")
    mergeable = {
        token: score
        for token, score, type_ in zip(tokens, scores, token_types, strict=True)
        if type_ == NORMAL
    }
    unknown = special_token(metadata, "unknown") or "<unk>"
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(mergeable, vocab),
            unk_token=unknown if unknown in vocab else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # llama.cpp puts a space before the text and before each text that follows a special token.
    spaces = normalizers.Replace(" ", SPACE)
    prefix = _typed(metadata, "add_space_prefix", bool) is not False
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_from_scores(scores: Mapping[str, float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best score of the whole first, as SentencePiece joins pairs."""
    longest = max(scores, key=len, default="")
    if len(longest) > MAX_PIECE:
        raise ValueError(
            f"tokenizer.ggml.tokens holds {shown(longest)} of {len(longest):,} characters; a piece of SentencePiece "
            f"has at most {MAX_PIECE}"
        )
    merges = []
    for token, score in scores.items():
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in scores]
        splits = [(left, right) for left, right in splits if right in scores]
        splits.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(-score, pair) for pair in splits]
    merges.sort(key=lambda entry: entry[0])
    return [pair for _, pair in merges]
