"""Builds tokenizers of the `tokenizers` library from files of unknown origin, checked before the library sees them.

The library is Rust: what it cannot allocate ends the process, and a broken assumption of it arrives as a
PanicException, which is no Exception. So what decides time and memory is bounded first, and panics become ordinary
errors.
"""

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.checkpoints.files import MIB, CheckpointError, parse_json, read_text
from jaxinfer.text.wording import first_line, shown

MAX_BYTES = 64 * MIB  # the largest published file, of 262,144 tokens, has 33 MB
MAX_TOKEN_ID = 1 << 24
MAX_PARTS = 64  # steps of a normalizer, pre-tokenizer, post-processor or decoder together
MAX_GROWTH = 256  # how many times longer normalizing may make a text
MAX_REGEX = 4096  # characters
MAX_AROUND = 64  # tokens that a post-processor puts around a text
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


@contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Errors and panics of the library as CheckpointError: `where`, and what the library says; ValueErrors are ours."""
    try:
        yield
    except ValueError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C and the end of the process
        raise CheckpointError(f"{where}: the tokenizers library refuses it ({first_line(error)})") from None


def load(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json. Raises CheckpointError for one that is damaged or over the limits above."""
    text = read_text(path, MAX_BYTES)
    try:
        _check(parse_json(path, text))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    with library_errors(str(path)):
        backend = tokenizers.Tokenizer.from_str(text)
        # Both are settings of the training run that wrote the file; a prompt is neither cut nor filled up here.
        backend.no_truncation()
        backend.no_padding()
    return backend


def _check(content: dict[str, Any]) -> None:
    """Raises ValueError for what could take memory or time without bound, naming the part."""
    model = content.get("model")
    if not isinstance(model, dict):
        raise ValueError(f"model is {shown(model)}, not an object")
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        for token, id_ in vocab.items():
            _check_id(id_, token)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key) is not None and len(str(model[key])) > 16:
            raise ValueError(f"model: {key} is {shown(model[key])}, longer than 16 characters")
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise ValueError("added_tokens is not a list of objects")
    for entry in added:
        _check_id(entry.get("id"), entry.get("content"))
    for name in PARTS:
        steps = list(_steps(name, content.get(name), 0))
        if len(steps) > MAX_PARTS:
            raise ValueError(f"{name} has {len(steps):,} steps, more than {MAX_PARTS}")
        growth = 1
        for step in steps:
            growth *= _growth(name, step)
            if growth > MAX_GROWTH and name != "decoder":
                raise ValueError(f"{name} can make a text over {MAX_GROWTH} times longer")


def _check_id(id_: Any, token: Any) -> None:
    if type(id_) is not int or not 0 <= id_ < MAX_TOKEN_ID:
        raise ValueError(
            f"token {shown(token)} has the id {shown(id_)}, not a number from 0 to {MAX_TOKEN_ID - 1:,}"
        )


def _steps(name: str, part: Any, depth: int) -> Iterator[dict[str, Any]]:
    """The steps of a part, those of its sequences one by one."""
    if part is None:
        return
    if not isinstance(part, dict):
        raise ValueError(f"{name} is {shown(part)}, not an object")
    if depth > 8:
        raise ValueError(f"{name} is nested more than 8 deep")
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        inner = part.get(key)
        if isinstance(inner, list):
            for step in inner:
                yield from _steps(name, step, depth + 1)
    yield part


def _growth(name: str, step: dict[str, Any]) -> int:
    """How many times longer a step can make a text. Raises ValueError for what the library must not see."""
    pattern, content = step.get("pattern"), step.get("content")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if isinstance(regex, str) and len(regex) > MAX_REGEX:
        raise ValueError(
            f"{name}: a regular expression of {len(regex):,} characters, more than {MAX_REGEX:,}"
        )
    kind = step.get("type")
    if kind == "Precompiled":
        _check_charsmap(name, step.get("precompiled_charsmap"))
    if kind == "TemplateProcessing":
        _check_template(name, step)
    if kind == "Prepend" and len(str(step.get("prepend"))) > MAX_GROWTH:
        raise ValueError(f"{name}: prepends more than {MAX_GROWTH} characters")
    if kind != "Replace" or not isinstance(content, str):
        return 1
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(literal, str) and literal:
        return max(1, -(-len(content) // len(literal)))
    return len(content) + 1  # before every character


def _check_charsmap(name: str, charsmap: Any) -> None:
    """SentencePiece's table: the size of a trie of 4-byte units, the trie, and texts; the library trusts the size."""
    try:
        table = base64.b64decode(charsmap or "", validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise ValueError(f"{name}: precompiled_charsmap is not base64") from None
    size = int.from_bytes(table[:4], "little")
    if charsmap and (len(table) < 4 or size > len(table) - 4 or size % 4):
        raise ValueError(f"{name}: precompiled_charsmap has a trie of {size:,} bytes in {len(table):,}")


def _check_template(name: str, step: dict[str, Any]) -> None:
    tokens = step.get("special_tokens")
    num_ids = {
        token: len(entry["ids"])
        for token, entry in (tokens.items() if isinstance(tokens, dict) else ())
        if isinstance(entry, dict) and isinstance(entry.get("ids"), list)
    }
    for key in ("single", "pair"):
        pieces = step.get(key)
        if not isinstance(pieces, list):
            continue  # the library has a text form too, which it refuses itself where it is wrong
        num_tokens, num_texts = 0, 0
        for piece in pieces:
            special = piece.get("SpecialToken") if isinstance(piece, dict) else None
            num_texts += special is None
            num_tokens += num_ids.get(str(special.get("id")), 1) if isinstance(special, dict) else 0
        if num_tokens > MAX_AROUND or num_texts > 2:
            raise ValueError(
                f"{name}: puts {num_tokens:,} tokens around {num_texts:,} texts, more than {MAX_AROUND} around 2"
            )
