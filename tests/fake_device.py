"""A device without arithmetic: pages hold the tokens, and the next token is a hash of what they hold.

If the scheduler ever hands out a page twice, shares one for writing, skips a position, forgets a copy or
resumes at the wrong place, the tokens read back differ from the sequence's own, so its next token differs
from `expected_tokens`.
"""

import zlib
from collections.abc import Iterable

from jaxinfer.request import Request, Sequence
from jaxinfer.scheduler import ScheduledStep, Scheduler


def next_token(tokens: Iterable[int | None], index: int, vocab: int) -> int:
    return zlib.crc32(repr((list(tokens), index)).encode()) % vocab


def expected_tokens(request: Request, index: int, vocab: int, max_model_len: int) -> tuple[list[int], str]:
    """Output and finish reason of one sample, computed alone: the oracle."""
    params, tokens = request.params, list(request.prompt_token_ids)
    prompt = len(tokens)
    limit = max_model_len if params.max_tokens is None else prompt + params.max_tokens
    while len(tokens) < limit:
        token = next_token(tokens, index, vocab)
        tokens.append(token)
        ends = (token in request.end_token_ids and not params.ignore_eos) or token in params.stop_token_ids
        if ends and len(tokens) - prompt > params.min_tokens:
            return tokens[prompt:], "stop"
    return tokens[prompt:], "length"


class FakeDevice:
    """Runs steps in order, as a device stream does. `masks_stops`: rows stop writing at an end id."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        vocab: int,
        masks_stops: bool = True,
        windows: tuple[int | None, ...] = (None,),
    ):
        self.page_size, self.vocab, self.masks_stops, self.windows = page_size, vocab, masks_stops, windows
        # of each KV group, the first one without a window
        self.slots: list[list[int | None]] = [[None] * (num_pages * page_size) for _ in windows]
        self.last_token: list[int | None] = [None] * max_num_seqs
        self.num_computed = 0
        self._ended: set[Sequence] = set()  # whose rows have stopped writing; what they read has no meaning

    def _write(self, seq: Sequence, position: int, token: int) -> None:
        for pages, slots in zip(seq.pages, self.slots, strict=True):
            page = pages[position // self.page_size]
            assert page != 0, "a real token is written to the null page"
            slots[page * self.page_size + position % self.page_size] = token
        self.num_computed += 1

    def _read(self, seq: Sequence, length: int) -> list[int | None]:
        """What the token at length - 1 sees; groups with a window must have the newest of it."""
        size, seen = self.page_size, []
        for pages, slots, window in zip(seq.pages, self.slots, self.windows, strict=True):
            first = 0 if window is None else max(0, length - window)
            seen.append([slots[pages[p // size] * size + p % size] for p in range(first, length)])
            assert all(pages[p // size] for p in range(first, length)), "a page was given back too early"
            if seq not in self._ended:
                assert seen[-1] == seen[0][first:], "a group with a window holds other tokens"
        return seen[0]

    def run(self, step: ScheduledStep) -> list[list[int]]:
        size = self.page_size
        for seq in step.admitted:
            self.last_token[seq.row] = None
        for group, source, target in step.page_copies:
            slots = self.slots[group]
            slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]
        results = []
        for row in step.rows:
            seq, position = row.seq, row.start
            for offset in range(row.num_tokens):
                token = self.last_token[seq.row] if row.from_row else seq.token_ids[position + offset]
                assert token is not None
                self._write(seq, position + offset, token)
                self._read(seq, position + offset + 1)
            position += row.num_tokens
            sampled: list[int] = []
            while len(sampled) < row.num_samples:
                if sampled:
                    self._write(seq, position, sampled[-1])
                    position += 1
                token = next_token(self._read(seq, position), seq.index, self.vocab)
                sampled.append(token)
                may_end = (
                    position - seq.num_prompt_tokens >= seq.params.min_tokens and not seq.params.ignore_eos
                )
                if self.masks_stops and may_end and token in seq.request.end_token_ids:
                    self._ended.add(seq)
                    break
            self.last_token[seq.row] = sampled[-1] if sampled else None
            # A masked row still yields ids; none of this filler may ever be accepted.
            sampled += [-7] * (step.num_steps - len(sampled))
            results.append(sampled)
        return results


def check_no_page_shared_for_writing(scheduler: Scheduler) -> None:
    """Every slot that may still be written belongs to a page with one holder."""
    for seq in scheduler.running:
        first = max(seq.num_computed_tokens, 0) // scheduler.allocator.page_size
        for page in seq.pages[0][first:]:
            assert scheduler.allocator.groups[0].ref_count(page) == 1, (
                f"page {page} is shared but will be written"
            )
