"""A `tokenizers.Tokenizer` from the metadata of a GGUF file.

Two kinds are built: byte-level BPE (`tokenizer.ggml.model` = "gpt2") and SentencePiece BPE with byte fallback
("llama"). Text is cut and joined as llama.cpp does it (src/llama-vocab.cpp), which is what the file was
written for. Any other kind or pre-tokenizer is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPACE = "\u2581"  # SentencePiece's visible space
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # in tokenizer.ggml.token_type, SentencePiece's numbers

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
    """The tokenizer that the `tokenizer.ggml.*` keys describe.

    Raises ValueError for a file without a vocabulary, a kind or pre-tokenizer that is not supported, arrays
    whose lengths disagree, and special ids outside the vocabulary.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or tokens is None:
        raise ValueError("the GGUF file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
    token_types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(token_types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(token_types)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        repeated = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise ValueError(f"tokenizer.ggml.tokens holds {repeated!r} more than once")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, tokens, token_types), True
    else:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; supported: 'gpt2', 'llama'")

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
    set_added_ends(
        tokenizer,
        bos=special_token(metadata, "bos")
        if metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
        else None,
        eos=special_token(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return tokenizer


def special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of `tokenizer.ggml.{name}_token_id`, or None where the file does not name one."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]
    if token_id >= len(tokens):
        raise ValueError(
            f"tokenizer.ggml.{name}_token_id is {token_id}, but the vocabulary ends at {len(tokens) - 1}"
        )
    return tokens[token_id]


def set_added_ends(tokenizer: Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Makes `encode` put `bos` before and `eos` behind the text (None: nothing there)."""
    ends = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    single = [token for token in (bos, "$A", eos) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether such a vocabulary adds BOS where the file is silent."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [_merge(merge) for merge in metadata.get("tokenizer.ggml.merges") or ()]
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
            f"tokenizer.ggml.merges holds {merge!r}, which is not two tokens with a space between"
        )
    return left, right


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], token_types: Sequence[int]
) -> Tokenizer:
    """SentencePiece BPE: the scores of whole tokens become an ordered list of merges."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores must have one entry for each of the {len(tokens)} tokens")
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
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_from_scores(scores: Mapping[str, float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best score of the whole first, as SentencePiece joins pairs."""
    merges = []
    for token, score in scores.items():
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        splits = [(left, right) for left, right in splits if left in scores and right in scores]
        splits.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(-score, pair) for pair in splits]
    merges.sort(key=lambda entry: entry[0])
    return [pair for _, pair in merges]
