"""Text to token ids and back, from a GGUF file or a Hugging Face directory, over the `tokenizers` library."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.checkpoints import gguf_tokenizer, tokenizer_json
from jaxinfer.checkpoints.files import (
    MIB,
    CheckpointError,
    has,
    inside,
    is_gguf,
    read_json_of,
    read_text,
)
from jaxinfer.checkpoints.sentencepiece_model import read_metadata
from jaxinfer.checkpoints.token_ids import valid_ids
from jaxinfer.sampling.params import check_characters
from jaxinfer.text.detokenizer import BYTE_TOKEN, DecoderRules, Detokenizer, decoder_rules
from jaxinfer.text.wording import shown

MAX_TEMPLATE_BYTES = MIB  # published chat templates have some tens of kilobytes
MAX_TEMPLATES = 64
_CHARS_PER_TOKEN = 8  # a text of fewer characters per token that fits is tokenized in one go
_AT_A_CUT = 64
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 is itself, the other bytes are U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


@dataclass(frozen=True)
class Tokenizer:
    """One model's tokenizer.

    `eos_token_ids` unites what ends a generation: the tokenizer's EOS, and `eos_token_id` of
    generation_config.json and config.json (its `text_config` too), or the GGUF keys `eos`, `eot` and
    `eom_token_id`.
    """

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    named_tokens: dict[str, str]  # "bos_token" -> "<s>"; the variables of chat templates
    chat_templates: dict[str, str]  # name -> Jinja source; "default", and "tool_use" where a model has one
    _bytes: dict[int, bytes] = field(default_factory=dict, repr=False)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None
    ) -> list[int]:
        """The ids of `text`. Special tokens written in the text are recognized.

        `add_special_tokens` adds what the model's tokenizer adds (BOS). A text that already begins with BOS
        gets no second one. With `max_tokens` a text is refused whose beginning has more already, before the rest
        is tokenized; a few more may come through.

        Raises:
          ValueError: the text holds half a surrogate pair, is too long, or the tokenizer fails on it.
        """
        if max_tokens is not None:
            self._refuse_longer(text, max_tokens)
        ids = self._ids(text, add_special_tokens)
        bos = self.bos_token_id
        if self.adds_bos and add_special_tokens and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return _tokenized(text, lambda: self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _refuse_longer(self, text: str, max_tokens: int) -> None:
        """Tokenizes beginnings of a long text, each twice the last. The end of one may be cut otherwise than
        in the whole text: `_AT_A_CUT` tokens are allowed for that."""
        length = _CHARS_PER_TOKEN * (max_tokens + _AT_A_CUT)
        while length < len(text):
            ids = self._ids(text[:length], False)
            if len(ids) > max_tokens + _AT_A_CUT:
                raise too_long(len(text), max_tokens)
            length *= 2

    def encode_plain(self, text: str) -> list[int]:
        """The ids of `text` as plain text: what looks like an added token is not taken for one.

        Raises:
          ValueError: as `encode`.
        """
        return _tokenized(text, lambda: self._encode_plain(text))

    def _encode_plain(self, text: str) -> list[int]:
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        pieces = [text]
        if self.backend.pre_tokenizer is not None:
            pieces = [piece for piece, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for piece in pieces for token in self.backend.model.tokenize(piece)]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids. No spaces are cleaned up. Added tokens are written as they are."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.append(token_ids) + detokenizer.finish()

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None outside the vocabulary."""
        return self.backend.id_to_token(token_id)

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for in running text (empty outside the vocabulary)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._token_bytes(token_id)
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        rules = self.decoder_rules
        if token_id in self.added_tokens:
            return token.encode()
        if rules.byte_level and all(char in BYTE_OF_CHAR for char in token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        if rules.byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return (token.replace(rules.space, " ") if rules.space else token).encode()

    @cached_property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def decoder_rules(self) -> DecoderRules:
        return decoder_rules(self.backend.decoder)

    @cached_property
    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Id -> token, of all that are found in text before it is cut; special and not."""
        return self.backend.get_added_tokens_decoder()

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the special tokens (hidden by `skip_special_tokens`)."""
        return {token.content: id_ for id_, token in self.added_tokens.items() if token.special}

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def adds_bos(self) -> bool:
        """Whether `encode` puts BOS before a text."""
        if self.bos_token_id is None:
            return False
        return self._ids("", True)[:1] == [self.bos_token_id]

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")


def _tokenized(text: str, tokenize: Callable[[], list[int]]) -> list[int]:
    """What `tokenize` makes of `text`; whatever it raises becomes a ValueError, so that one text fails alone.

    The library raises plain Exceptions, and panics (BaseExceptions) where a pattern of the tokenizer gives up.
    """
    try:
        return tokenize()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if not isinstance(text, str):
            raise TypeError(f"a text is a str, not {type(text).__name__}") from None
        check_characters("the text", text)
        raise ValueError(
            f"the model's tokenizer fails on a text of {len(text)} characters: {shown(str(error))}"
        ) from error


def too_long(num_chars: int, max_tokens: int) -> ValueError:
    """The error for a text that has more tokens than fit."""
    return ValueError(
        f"the prompt is too long: its {num_chars} characters have over {max_tokens} tokens, and max_model_len is "
        f"{max_tokens}; shorten it, or raise max_model_len"
    )


def load_tokenizer(path: str | Path, metadata: Mapping[str, Any] | None = None) -> Tokenizer:
    """Loads the tokenizer of a GGUF file or of a directory with tokenizer.json, else SentencePiece's tokenizer.model.

    metadata: key-value pairs of the GGUF file, if they have been read already (`Checkpoint.metadata`).

    Raises FileNotFoundError when there is none, and ValueError (CheckpointError for files that are damaged, outside
    the directory or out of bounds) naming the file and the kind or part that is not supported.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such GGUF file or model directory")
    if metadata is None and not path.is_dir():
        if not is_gguf(path):
            raise CheckpointError(f"{path} is neither a GGUF file nor a model directory")
        from jaxinfer.checkpoints.gguf import read_header  # here: nothing else needs the gguf package

        metadata = read_header(path).metadata
    try:
        return _from_directory(path) if metadata is None else from_gguf_metadata(metadata)
    except ValueError as error:
        if str(error).startswith(str(path)):
            raise
        raise CheckpointError(f"{path}: {error}") from error


def from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer in the key-value pairs of a GGUF file; ValueError as `gguf_tokenizer.build`."""
    backend = gguf_tokenizer.build(metadata)
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": template
        for key, template in metadata.items()
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
    }
    return _checked(
        Tokenizer(
            backend=backend,
            bos_token_id=gguf_tokenizer.special_id(metadata, "bos"),
            eos_token_ids=frozenset(
                id_ for key in keys for id_ in valid_ids(metadata.get(key), key, num_tokens)
            ),
            named_tokens=_named_tokens(metadata),
            chat_templates=_templates("tokenizer.chat_template", templates),
        )
    )


def _named_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens = {name: gguf_tokenizer.special_token(metadata, key) for name, key in names.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def _from_directory(path: Path) -> Tokenizer:
    config = read_json_of(path, "tokenizer_config.json")
    named = {}
    if has(path, "tokenizer.json"):
        backend = tokenizer_json.load(inside(path, "tokenizer.json"))
    elif has(path, "tokenizer.model"):
        file = inside(path, "tokenizer.model")
        metadata = read_metadata(file)
        try:
            backend, named = gguf_tokenizer.build(metadata), _named_tokens(metadata)
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}") from None
    else:
        raise FileNotFoundError(f"{path} has neither tokenizer.json nor tokenizer.model")
    with tokenizer_json.library_errors(f"{path / 'tokenizer_config.json'}"):
        if not has(path, "tokenizer.json"):
            _add_tokens_of_config(path, backend, config)
        named |= _tokens_of_config(path, config)
        # A token that the configuration names is special also where tokenizer.json holds it as a plain word.
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        in_vocab = [token for token in named.values() if backend.token_to_id(token) is not None]
        backend.add_special_tokens([token for token in in_vocab if token not in known])
        bos, eos = named.get("bos_token"), named.get("eos_token")
        if "add_bos_token" in config or "add_eos_token" in config:
            _follow_config(backend, config, bos, eos)
    return _checked(
        Tokenizer(
            backend=backend,
            bos_token_id=backend.token_to_id(bos) if bos is not None else None,
            eos_token_ids=_end_ids(path, backend, eos),
            named_tokens=named,
            chat_templates=_read_chat_templates(path, config),
        )
    )


def _tokens_of_config(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """NAMED_TOKENS as tokenizer_config.json has them, else special_tokens_map.json."""
    special_map = read_json_of(path, "special_tokens_map.json")
    named = {}
    for name in NAMED_TOKENS:
        file, token = ("tokenizer_config.json", config.get(name))
        if not token:
            file, token = ("special_tokens_map.json", special_map.get(name))
        if isinstance(token, dict):  # a serialized AddedToken
            token = token.get("content")
        if token is not None and not isinstance(token, str):
            raise CheckpointError(f"{path / file}: {name} is {shown(token)}, not a text")
        if token is not None:
            named[name] = token
    return named


def _end_ids(path: Path, backend: tokenizers.Tokenizer, eos: str | None) -> frozenset[int]:
    """The id of the tokenizer's EOS, and `eos_token_id` of generation_config.json and config.json.

    Raises CheckpointError for ids outside the vocabulary of the model (of the tokenizer, where config.json is silent).
    """
    model_config = read_json_of(path, "config.json")
    nested = model_config.get("text_config")
    size = model_config.get("vocab_size")
    if not isinstance(size, int):
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    sources = {
        "tokenizer_config.json: eos_token": None if eos is None else backend.token_to_id(eos),
        "generation_config.json: eos_token_id": read_json_of(path, "generation_config.json").get(
            "eos_token_id"
        ),
        "config.json: eos_token_id": model_config.get("eos_token_id"),
        "config.json: text_config: eos_token_id": nested.get("eos_token_id")
        if isinstance(nested, dict)
        else None,
    }
    return frozenset(id_ for where, ids in sources.items() for id_ in valid_ids(ids, str(path / where), size))


def _add_tokens_of_config(path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """The tokens that transformers keeps beside a tokenizer.model, in tokenizer_config.json."""
    file, added = path / "tokenizer_config.json", config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(
        id_.isascii()
        and id_.isdecimal()
        and isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        for id_, entry in added.items()
    ):
        raise CheckpointError(f"{file}: added_tokens_decoder does not map ids to objects with a content")
    for id_, entry in sorted((int(id_[:12]), entry) for id_, entry in added.items()):
        options = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = tokenizers.AddedToken(
            entry["content"], **{name: entry[name] for name in options if name in entry}
        )
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != id_:
            raise CheckpointError(
                f"{file} gives token {shown(token.content)} the id {id_}, which is not next"
            )


def _follow_config(
    backend: tokenizers.Tokenizer, config: dict[str, Any], bos: str | None, eos: str | None
) -> None:
    """tokenizer_config.json may overrule what tokenizer.json adds around a text, as in transformers."""
    added = backend.encode("").tokens
    adds_bos, adds_eos = bos in added, eos in added and eos != bos
    wants_bos = bos is not None and config.get("add_bos_token", adds_bos)
    wants_eos = eos is not None and config.get("add_eos_token", adds_eos)
    if (wants_bos, wants_eos) != (adds_bos, adds_eos):
        gguf_tokenizer.set_added_ends(backend, bos=bos if wants_bos else None, eos=eos if wants_eos else None)


def _read_chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """From chat_template.jinja before tokenizer_config.json before chat_template.json, and their folder."""
    file = path / "tokenizer_config.json"
    template = config.get("chat_template")
    if not template:
        file, template = (
            path / "chat_template.json",
            read_json_of(path, "chat_template.json").get("chat_template"),
        )
    if isinstance(template, list):  # [{"name": ..., "template": ...}]
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in template):
            raise CheckpointError(f"{file}: chat_template is a list, but not of objects with a name")
        templates = {entry["name"]: entry.get("template") for entry in template}
    else:
        templates = {"default": template} if template else {}
    templates = _templates(f"{file}: chat_template", templates)
    if has(path, "chat_template.jinja"):
        templates["default"] = read_text(inside(path, "chat_template.jinja"), MAX_TEMPLATE_BYTES)
    folder = "additional_chat_templates"
    names = sorted(file.name for file in (path / folder).glob("*.jinja")) if has(path, folder) else []
    if len(names) > MAX_TEMPLATES:
        raise CheckpointError(f"{path / folder} has {len(names):,} templates, more than {MAX_TEMPLATES}")
    for name in names:
        templates[Path(name).stem] = read_text(inside(path, f"{folder}/{name}"), MAX_TEMPLATE_BYTES)
    return templates


def _templates(where: str, templates: dict[str, Any]) -> dict[str, str]:
    """`templates` as they are. Raises CheckpointError for one that is no text, or longer than a template may be."""
    for name, template in templates.items():
        if not isinstance(template, str):
            raise CheckpointError(f"{where}: template {shown(name)} is {shown(template)}, not a text")
        if len(template) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(
                f"{where}: template {shown(name)} has {len(template):,} characters, more than {MAX_TEMPLATE_BYTES:,}"
            )
    return templates


def _checked(tokenizer: Tokenizer) -> Tokenizer:
    """Refuses at load time what would only fail when the first text comes out."""
    _ = tokenizer.decoder_rules
    return tokenizer
