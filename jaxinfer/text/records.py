"""One request of a user on its way through the engine: token ids become text, entries get their names."""

import copy
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.outputs import CompletionOutput, Loglikelihood, Logprob, RequestOutput
from jaxinfer.request import Sequence
from jaxinfer.text.detokenizer import TextStream
from jaxinfer.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Record:
    """One request, from its prompt to its finished output."""

    prompt: str | None
    prompt_token_ids: list[int] = field(default_factory=list)
    request_id: str = ""
    tokenizer: Tokenizer | None = None  # None: no text, and no names of tokens
    sequences: list[Sequence] = field(default_factory=list)
    error: str | None = None
    reader: "deque[Record] | None" = None  # where it is put when it has changed
    changed: bool = False  # since its reader last looked
    delivered: bool = False  # its reader has seen it finished
    _streams: list[TextStream] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _num_named: dict[int, int] = field(default_factory=dict)  # entries of logprobs that have names, by list

    def begin(self, sequences: list[Sequence]) -> None:
        """The engine has taken the request: `sequences` are its samples."""
        self.sequences, self._texts = sequences, [""] * len(sequences)
        if self.tokenizer is not None:
            params = sequences[0].params
            self._streams = [
                TextStream(
                    self.tokenizer,
                    self.prompt_token_ids,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=tuple(params.stop),
                    include_stop=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                )
                for _ in sequences
            ]

    @property
    def finished(self) -> bool:
        return self.error is not None or all(seq.finish_reason is not None for seq in self.sequences)

    def notify(self) -> None:
        """Something has changed: tells the reader once."""
        if not self.changed and not self.delivered:
            self.changed = True
            if self.reader is not None:
                self.reader.append(self)

    def take(self, seq: Sequence) -> tuple[str, int] | None:
        """Takes in new tokens of a sample. A stop string, and how many tokens it leaves, if one was found."""
        if self.tokenizer is None:
            return None
        stream = self._streams[seq.index]
        ids = seq.output_token_ids[stream.num_tokens :]
        ended_by_token = seq.finish_reason == "stop"
        if ended_by_token and not seq.params.include_stop_str_in_output:
            ids = ids[:-1]  # an end token, special or not, is no part of the text
        text = stream.append(ids)
        if seq.finish_reason is not None:
            text += stream.finish()
        self._texts[seq.index] += text
        # A step of several tokens may bring a stop string and, after it, the end id: what came first counts.
        stopped_first = not ended_by_token or stream.num_tokens < seq.num_output_tokens
        if stream.stop_reason is not None and stopped_first:
            return stream.stop_reason, stream.num_tokens
        return None

    def output(self) -> RequestOutput:
        for seq in self.sequences:
            for entries in (seq.logprobs, seq.prompt_logprobs):
                if isinstance(entries, list):
                    self._name_tokens(entries)
        first = self.sequences[0] if self.sequences else None
        metrics = [seq.metrics for seq in self.sequences if seq.metrics is not None]
        scored = first is not None and first.request.num_prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=copy.copy(first.prompt_logprobs) if first is not None and scored else None,
            outputs=[
                CompletionOutput(
                    index=seq.index,
                    text=text,
                    token_ids=seq.output_token_ids,
                    cumulative_logprob=None if seq.request.num_logprobs is None else seq.cumulative_logprob,
                    logprobs=None if seq.request.num_logprobs is None else copy.copy(seq.logprobs),
                    finish_reason=seq.finish_reason,
                    stop_reason=seq.stop_reason,
                )
                for seq, text in zip(self.sequences, self._texts, strict=True)
            ],
            finished=self.finished,
            # With n > 1 the times are those of the sample that ended last.
            metrics=max(metrics, key=lambda m: m.finished_time or 0.0) if metrics else None,
            num_cached_tokens=first.num_cached_tokens if first else 0,
            error=self.error,
            seed=first.request.seed if first else None,
        )

    def loglikelihood(self) -> Loglikelihood:
        """Of the prompt from `score_from` on, once finished with prompt_logprobs."""
        seq = self.sequences[0]
        start = seq.request.score_from
        places = zip(seq.prompt_logprobs[start:], self.prompt_token_ids[start:], strict=True)
        chosen = [entries[token] for entries, token in places if entries is not None]
        logprobs = [entry.logprob for entry in chosen]
        return Loglikelihood(sum(logprobs), all(entry.rank == 1 for entry in chosen), logprobs)

    def _name_tokens(self, entries: list[Any]) -> None:
        """Fills text and bytes of the entries that have come since the last call."""
        if self.tokenizer is not None:
            start = min(self._num_named.get(id(entries), 0), len(entries))
            name_tokens(self.tokenizer, (entry for entry in entries[start:] if entry is not None))
            self._num_named[id(entries)] = len(entries)


def name_tokens(tokenizer: Tokenizer, entries: Iterable[dict[int, Logprob]]) -> None:
    """Fills `decoded_token` and `bytes` of entries by token id, in place."""
    for entry in entries:
        for token, logprob in entry.items():
            content = tokenizer.id_to_bytes(token)
            logprob.bytes = list(content)
            logprob.decoded_token = content.decode("utf-8", errors="replace")
