"""Token ids to text, a few ids at a time: the pieces joined are one decode of all ids.

The decoders of `tokenizers` need the whole list of ids. The ones that language models use keep little state
between tokens, and that state is kept here: the bytes of a character that has not ended, and whether the text
has begun. A decoder that is not known here is refused by name when the tokenizer is loaded.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer.text.stop_strings import StopStrings
from jaxinfer.text.wording import shown

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class DecoderRules:
    """What the decoder of a tokenizer.json does to its tokens."""

    byte_level: bool = False  # each character of a token stands for one byte (GPT-2)
    space: str | None = None  # the character that stands for a space (SentencePiece)
    byte_fallback: bool = False  # <0xNN> tokens are bytes
    strip_start: int = 0  # so many spaces at the start of the text are dropped
    first_token_spaces_dropped: bool = False  # Metaspace: the first token loses all of its space characters
    separator: str = ""  # between tokens (a tokenizer without a decoder joins by spaces)


def decoder_rules(decoder: Any) -> DecoderRules:
    """Reads a `tokenizers` decoder (or None). Raises ValueError naming a decoder that cannot be streamed."""
    if decoder is None:
        return DecoderRules(separator=" ")
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return DecoderRules(byte_level=True)
        case ["Metaspace"]:
            dropped = steps[0].get("prepend_scheme", "always") != "never"
            return DecoderRules(space=steps[0]["replacement"], first_token_spaces_dropped=dropped)
        case ["Replace", "ByteFallback", "Fuse", *rest]:
            plain = steps[0]["pattern"].get("String"), steps[0]["content"]
            if plain[0] and plain[1] == " " and rest in ([], ["Strip"]):
                strip: dict[str, Any] = steps[3] if rest else {"content": " ", "start": 0, "stop": 0}
                if strip["content"] == " " and strip["stop"] == 0:
                    return DecoderRules(space=plain[0], byte_fallback=True, strip_start=strip["start"])
    raise ValueError(
        f"the tokenizer's decoder {shown(json.dumps(spec, ensure_ascii=False), 300)} is not supported; supported are "
        "ByteLevel, Metaspace, and SentencePiece's Replace, ByteFallback, Fuse, Strip"
    )


class Detokenizer:
    """The text of one sequence as its ids arrive.

    `append` returns the text that the new ids complete, never half a character; `finish` returns what is left
    (the replacement character for bytes that did not become one). All of it joined equals
    `tokenizer.decode(prompt + ids)` without the text of the prompt. A prompt that ends inside a character is
    completed by the text that follows it. Ids outside the vocabulary (padding rows of a model) have no text,
    as in `tokenizers`.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        rules = tokenizer.decoder_rules
        self._stream: _Utf8Stream | _PieceStream = _Utf8Stream() if rules.byte_level else _PieceStream(rules)
        self._seed(prompt_token_ids)

    def append(self, token_ids: Iterable[int]) -> str:
        """Takes ids, returns the new text."""
        pieces = [self._stream.push(self._tokenizer, id_) for id_ in token_ids if id_ not in self._hidden]
        return "".join(pieces)

    def finish(self) -> str:
        """No more ids come: returns the text that was waiting for them."""
        return self._stream.finish()

    @property
    def waiting(self) -> str:
        """Whole characters that are held because the next token could still spoil them ("" in most vocabularies)."""
        return self._stream.waiting

    def _seed(self, prompt_token_ids: Sequence[int]) -> None:
        """Brings the stream to the state behind the prompt."""
        if self._tokenizer.decoder_rules.byte_level:
            # All that can matter is an unfinished character, of at most 3 bytes.
            start, num_bytes = len(prompt_token_ids), 0
            while start > 0 and num_bytes < 3:
                start -= 1
                if prompt_token_ids[start] not in self._hidden:
                    num_bytes += len(self._tokenizer.id_to_bytes(prompt_token_ids[start]))
            prompt_token_ids = prompt_token_ids[start:]
        self.append(prompt_token_ids)
        self._stream.drop_complete()


class TextStream:
    """The text of one sequence up to its stop string.

    A stop string that is the text of a special token also ends the sequence when special tokens are hidden
    from the text; a longer stop string that contains one cannot match then. Stop strings that are complete
    within the first `min_tokens` tokens are passed over.

    Attributes: `stop_reason`, the stop string that ended the text or None; `num_tokens`, how many ids were
    taken, the one that completed the stop string last. Ids that come after it are ignored.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        self.stop_reason: str | None = None
        self.num_tokens = 0
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop, include=include_stop)
        self._has_stops = bool(stop)
        self._ahead: _Ahead | None = None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        special = tokenizer.special_tokens if skip_special_tokens else {}
        self._hidden_stops = {special[string]: string for string in stop if string in special}

    def append(self, token_ids: Iterable[int]) -> str:
        """Takes ids, returns the new text that no stop string can still take back."""
        if not self._has_stops:
            token_ids = list(token_ids)
            self.num_tokens += len(token_ids)
            return self._detokenizer.append(token_ids)
        texts = []
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self.num_tokens += 1
            texts.append(self._match(self._detokenizer.append([token_id])))
            if self.stop_reason is None and token_id in self._hidden_stops and self._armed:
                texts.append(self.finish())
                if self.stop_reason is None:
                    self.stop_reason = self._hidden_stops[token_id]
                    texts.append(self.stop_reason if self._include_stop else "")
        return "".join(texts)

    def finish(self) -> str:
        """No more ids come: returns the text that was held back (which may complete a stop string)."""
        if self.stop_reason is not None:
            return ""
        text = self._match(self._detokenizer.finish())
        return text if self.stop_reason is not None else text + self._stops.finish()

    @property
    def _armed(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _match(self, text: str) -> str:
        """Looks for stop strings in new text and in what the detokenizer still holds; returns text to show."""
        shown = ""
        if text and self._ahead is not None:  # what was held has come, or has turned out to be broken
            if text.startswith(self._ahead.text):
                self._stops, shown = self._ahead.stops, self._ahead.shown
                text = text.removeprefix(self._ahead.text)
            self._ahead = None
        match = self._stops.push(text, armed=self._armed)
        shown, self.stop_reason = shown + match.text, match.stop
        waiting = self._detokenizer.waiting
        if self.stop_reason is None and waiting:
            # If a stop string is complete here, no more ids come, so what waits is the text.
            self._ahead = self._ahead or _Ahead(self._stops.fork())
            match = self._ahead.stops.push(waiting[len(self._ahead.text) :], armed=self._armed)
            self._ahead.text = waiting
            self._ahead.shown += match.text
            if match.stop is not None:
                shown, self.stop_reason = shown + self._ahead.shown, match.stop
        return shown


@dataclass
class _Ahead:
    """The matcher run over text that waits in the detokenizer."""

    stops: StopStrings
    text: str = ""  # what it was run over
    shown: str = ""  # what it would have shown


class _Utf8Stream:
    """Byte-level tokens: their bytes joined are UTF-8."""

    waiting = ""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokenizer: "Tokenizer", token_id: int) -> str:
        return self._decoder.decode(tokenizer.id_to_bytes(token_id))

    def drop_complete(self) -> None:
        pass  # complete characters are never held

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceStream:
    """Tokens that are text, with some that are single bytes (SentencePiece)."""

    def __init__(self, rules: DecoderRules):
        self._rules = rules
        self._bytes = bytearray()  # of the byte tokens since the last other token
        self._run_decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()
        self.waiting = ""  # the whole characters in `_bytes`, if all of it is well formed so far
        self._strip_left = rules.strip_start
        self._started = False

    def push(self, tokenizer: "Tokenizer", token_id: int) -> str:
        token = tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        rules = self._rules
        if rules.byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            # Held until another token comes: one bad byte turns the whole run into replacement characters.
            self._hold(int(byte[1], 16))
            return ""
        if rules.space is not None:
            drop = rules.first_token_spaces_dropped and not self._started
            token = token.replace(rules.space, "" if drop else " ")
        if self._started:
            token = rules.separator + token
        self._started = True
        return self._strip(self._flush_bytes() + token)

    def drop_complete(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if decoder.decode(self._take_bytes()):
            self._strip_left = 0
        for byte in decoder.getstate()[0]:
            self._hold(byte)

    def finish(self) -> str:
        return self._strip(self._flush_bytes())

    def _hold(self, byte: int) -> None:
        self._bytes.append(byte)
        if (
            self._run_decoder is None or self._strip_left
        ):  # the run is broken, or its first space may be dropped
            return
        try:
            self.waiting += self._run_decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._run_decoder, self.waiting = None, ""

    def _take_bytes(self) -> bytes:
        run, self._bytes, self.waiting = bytes(self._bytes), bytearray(), ""
        self._run_decoder = codecs.getincrementaldecoder("utf-8")()
        return run

    def _flush_bytes(self) -> str:
        run = self._take_bytes()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        if self._strip_left and text:
            kept = text.lstrip(" ")
            dropped = min(len(text) - len(kept), self._strip_left)
            self._strip_left = 0 if kept else self._strip_left - dropped
            text = text[dropped:]
        return text
