"""Who runs in the next step, on which pages, and what its result means. Host integers only: no jax, no clock.

The engine's loop is `step = schedule()`, run it on the device, `commit(step, sampled)`. `schedule` may be
called again before the commit (dispatch ahead): counters move when a sequence is scheduled, and
`num_pending_tokens` counts tokens whose ids only the device knows yet. `commit` drops tokens sampled past
the end of a sequence.

A step holds one query token of every decoding row, then prompt chunks up to `max_num_batched_tokens`.
Requests are admitted in order of (priority, arrival). Admission takes pages for all tokens known so far,
so only decoding grows. When it cannot, the last in that order is preempted: it gives its pages back, and
later computes its prompt and output again without sampling them again.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from jaxinfer.page_groups import PageGroups
from jaxinfer.request import Request, Sequence, SequenceStatus


class RequestTooLong(ValueError):
    """The request can never fit, whatever else runs."""


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int  # rows
    max_num_batched_tokens: int  # query tokens in one step, decode rows included
    max_model_len: int  # prompt + output tokens of one sequence
    max_num_partial_prefills: int = 1  # prompts that may be under way in chunks at the same time
    decode_steps: int = 8  # k: tokens per row and step when every row decodes and nothing waits
    max_multi_step_rows: int | None = (
        None  # more rows than this take one step at a time; None: any number may
    )

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_partial_prefills", "decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: every decoding row needs one token per step"
            )

    @property
    def max_step_tokens(self) -> int:
        """The most tokens of one sequence in one step."""
        return max(self.max_num_batched_tokens, self.decode_steps)


class ScheduledRow(NamedTuple):
    seq: Sequence
    start: int  # position of the first query token
    num_tokens: int  # query tokens of the step (of its first iteration, when num_steps > 1)
    num_samples: int  # 0: prompt chunk; else 1 to num_steps. Iterations past it write to the null page
    from_row: bool  # the input id is the row's last token on the device; the host does not know it yet

    @property
    def samples(self) -> bool:
        return self.num_samples > 0


@dataclass(frozen=True)
class ScheduledStep:
    rows: tuple[ScheduledRow, ...]  # those with one query token first
    num_steps: int  # k
    num_tokens: int  # query tokens of all rows
    page_copies: tuple[tuple[int, int, int], ...]  # (KV group, source, destination), before the step runs
    admitted: tuple[Sequence, ...]  # sequences that got their row in this step: their row state starts anew


@dataclass(frozen=True)
class SchedulerStats:
    num_running: int
    num_waiting: int
    pages_used: int
    pages_total: int
    num_preemptions: int
    num_prompt_tokens: int  # of sequences admitted for the first time
    num_cached_tokens: int  # those of them that were not computed
    peak_pages_used: int = 0


class Scheduler:
    def __init__(self, config: SchedulerConfig, allocator: PageGroups):
        self.config = config
        self.allocator = allocator
        self.running: list[Sequence] = []  # ordered by key
        self._sequences: dict[str, list[Sequence]] = {}  # unfinished requests
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap by key
        self._num_waiting = 0
        # What running sequences compute (a prefix key, or a request id: its prompt) and who waits for it.
        self._claims: dict[bytes | str, list[Sequence]] = {}
        self._num_parked = 0
        self._in_flight: deque[ScheduledStep] = deque()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_submitted = self._num_preemptions = self._num_prompt_tokens = self._num_cached_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences or self._in_flight)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def add(self, request: Request) -> list[Sequence]:
        """Queues `params.n` sequences. Raises RequestTooLong, with the numbers, if one could never finish."""
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        # The last token sampled is never an input, so it needs no slot.
        capacity = self.allocator.capacity
        longest = min(self.config.max_model_len, capacity + 1)
        total = max(longest, prompt + 1) if max_tokens is None else prompt + max_tokens
        if total > longest or prompt > capacity:
            raise RequestTooLong(
                f"request {request.request_id}: a prompt of {prompt} tokens + max_tokens={max_tokens} does "
                f"not fit max_model_len={self.config.max_model_len} and a pool of {capacity} tokens; "
                "shorten the prompt, lower max_tokens, or give the engine more pages"
            )
        order, self._num_submitted = self._num_submitted, self._num_submitted + 1
        seqs = [Sequence(request, index, order) for index in range(request.params.n)]
        self._sequences[request.request_id] = seqs
        for seq in seqs:
            seq.max_total_tokens = total
            self._enqueue(seq)
        self._num_waiting += len(seqs)
        return list(seqs)

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can run before the steps in flight are committed."""
        num_steps = self._num_steps()
        preemptions = self._num_preemptions
        rows = self._decode_rows(num_steps)
        budget = self.config.max_num_batched_tokens - len(rows)

        # Prompt chunks: each gets an equal share of the budget left, and the first what remains.
        chunks: dict[Sequence, int] = {}
        admitted: list[Sequence] = []
        copies: list[tuple[int, int, int]] = []
        under_way = [seq for seq in self.running if seq.num_uncomputed_tokens > 1]
        admissions = self._admissions(admitted, copies) if self._num_preemptions == preemptions else ()
        num_free_chunks = self.config.max_num_partial_prefills
        for seq in chain(under_way, admissions):
            chunks[seq] = min(seq.num_uncomputed_tokens, max(1, budget // num_free_chunks))
            budget -= chunks[seq]
            num_free_chunks -= chunks[seq] < seq.num_uncomputed_tokens
            if budget == 0 or num_free_chunks == 0:
                break
        for seq, chunk in chunks.items():
            extra = min(seq.num_uncomputed_tokens - chunk, budget)
            budget -= extra
            rows.append(self._advance(seq, chunk + extra, 1))

        if not rows:
            return None
        rows.sort(key=lambda row: row.num_tokens > 1)  # stable
        num_tokens = sum(row.num_tokens for row in rows)
        step = ScheduledStep(tuple(rows), num_steps, num_tokens, tuple(copies), tuple(admitted))
        self._in_flight.append(step)
        return step

    def commit(
        self, step: ScheduledStep, sampled: Seq[Seq[int]], shareable: Seq[bool] | None = None
    ) -> list[int]:
        """Takes in what the oldest step in flight sampled: `sampled[i]` for `rows[i]`, extra ids ignored.

        `shareable[i]` (None: all are) says whether what `rows[i]` wrote may serve others with the same prefix.

        Returns how many of each row were accepted: none past an end, none for prompt chunks and for sequences
        that ended meanwhile.
        """
        if not self._in_flight or self._in_flight[0] is not step:
            raise ValueError("steps are committed once each, in the order in which they were scheduled")
        self._in_flight.popleft()
        shared = [True] * len(step.rows) if shareable is None else shareable
        accepted = [self._commit_row(*each) for each in zip(step.rows, sampled, shared, strict=True)]
        self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]
        return accepted

    def finish(
        self,
        seq: Sequence,
        reason: str,
        stop_reason: int | str | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """Ends `seq` from outside (a stop string was found), keeping its first `num_output_tokens` tokens.

        Also allowed just after it ended by itself: the text may show a stop before the last token.
        """
        if num_output_tokens is not None:
            del seq.token_ids[seq.num_prompt_tokens + num_output_tokens :]
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        if not seq.finished:
            self._leave(seq, SequenceStatus.FINISHED)

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends the unfinished sequences of a request with "abort" and returns them; none if it has ended."""
        seqs = [seq for seq in self._sequences.get(request_id, ()) if not seq.finished]
        for seq in seqs:
            self.finish(seq, "abort")
        return seqs

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, since the weights changed. Raises RuntimeError while sequences run."""
        if self.running or self._in_flight:
            raise RuntimeError(f"{len(self.running)} sequences are running: finish or abort them first")
        self.allocator.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=self._num_waiting,
            pages_used=self.allocator.num_used,
            pages_total=self.allocator.num_usable,
            peak_pages_used=self.allocator.peak_used,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )

    # Decoding

    def _decode_rows(self, num_steps: int) -> list[ScheduledRow]:
        """Rows that have one query token left: they decode, or compute the last token of a prompt."""
        rows = []
        position = 0
        while position < len(self.running):
            seq = self.running[position]
            if seq.num_uncomputed_tokens == 1 and not seq.ends_in_flight and self._grow(seq, num_steps):
                rows.append(self._advance(seq, 1, num_steps))
            position += seq.status is SequenceStatus.RUNNING  # else it was preempted, and the list is shorter
        return rows

    def _num_steps(self) -> int:
        """k, more than 1 only if every row decodes, nothing waits, and pages for k tokens each are free."""
        k, num_pages, longest = self.config.decode_steps, 0, 1
        limit = self.config.max_multi_step_rows
        if self._num_waiting or k == 1 or (limit is not None and len(self.running) > limit):
            return 1
        for seq in self.running:
            if seq.num_uncomputed_tokens > 1:
                return 1
            num_samples = min(k, seq.max_total_tokens - seq.num_tokens)
            longest = max(longest, num_samples)
            num_pages += self.allocator.num_missing(seq.pages, seq.num_computed_tokens + num_samples)
        # Few tokens left everywhere: most of k iterations would be thrown away.
        return k if longest > k // 2 and num_pages <= self.allocator.num_free else 1

    def _grow(self, seq: Sequence, num_steps: int) -> bool:
        """Gives `seq` pages for its next tokens, preempting from the end of the order. False: not now."""
        num_samples = max(1, min(num_steps, seq.max_total_tokens - seq.num_tokens))
        missing = self.allocator.num_missing(seq.pages, seq.num_computed_tokens + num_samples)
        while missing > self.allocator.num_free:
            if self.config.max_num_seqs - len(self._free_rows) > len(self.running):
                return False  # one that has left gives its pages back when the steps in flight are committed
            victim = self.running.pop()
            victim.num_preemptions += 1
            self._num_preemptions += 1
            self._leave(victim, SequenceStatus.PREEMPTED)
            if victim is seq:
                return False
        if missing > 0:
            self.allocator.grow(seq.pages, missing)
        return True

    def _advance(self, seq: Sequence, num_tokens: int, num_steps: int) -> ScheduledRow:
        """Moves the counters of `seq` over its part of a step."""
        start = seq.num_computed_tokens
        num_samples = 0
        if num_tokens == seq.num_uncomputed_tokens:
            num_samples = min(num_steps, seq.max_total_tokens - seq.num_tokens)
        row = ScheduledRow(seq, start, num_tokens, num_samples, from_row=start >= len(seq.token_ids))
        seq.num_computed_tokens += num_tokens + max(0, num_samples - 1)
        self.allocator.slide(seq.pages, start, seq.num_computed_tokens)
        seq.num_pending_tokens += num_samples
        seq.num_steps_in_flight += 1
        return row

    # Admission

    def _admissions(self, admitted: list[Sequence], copies: list[tuple[int, int, int]]) -> Iterator[Sequence]:
        """Admits in order, while there are rows and pages; parks those whose prefix is under way."""
        while self._waiting and self._free_rows:
            _, seq = self._waiting[0]
            if seq.status is SequenceStatus.WAITING:  # else it was aborted while it waited
                awaited = self._awaited_prefix(seq)
                if awaited is None:
                    if not self._admit(seq, copies):
                        return
                    admitted.append(seq)
                else:
                    if self._num_parked >= self.config.max_num_seqs:
                        return  # keeps the cost of a step independent of the length of the queue
                    self._claims[awaited].append(seq)
                    self._num_parked += 1
            heapq.heappop(self._waiting)
            if seq.status is SequenceStatus.RUNNING:
                yield seq

    def _enqueue(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        heapq.heappush(self._waiting, (seq.key, seq))

    def _prefix_keys(self, seq: Sequence) -> list[bytes]:
        """Keys of the full pages that `seq` could share: at least its last token is always computed."""
        if not self.allocator.enable_prefix_caching:
            return []
        self.allocator.extend_keys(seq.page_keys, seq.token_ids, seq.request.cache_salt)
        return seq.page_keys[: (len(seq.token_ids) - 1) // self.allocator.page_size]

    def _shareable_keys(self, seq: Sequence) -> list[bytes]:
        """Keys of the pages that `seq` may take from others: a prompt is scored from hidden states, not pages."""
        keys = self._prefix_keys(seq)
        return keys[: (seq.request.score_from - 1) // self.allocator.page_size] if seq.scores_prompt else keys

    def _fork_source(self, seq: Sequence) -> Sequence | None:
        """A running sample of the same request that has in its pages what the end of the prompt sees."""
        if seq.params.n == 1 or seq.num_output_tokens or seq.scores_prompt:
            return None
        num_shared = seq.num_prompt_tokens - 1
        for other in self._sequences[seq.request.request_id]:
            if (
                other.status is SequenceStatus.RUNNING
                and other.num_computed_tokens > num_shared
                and self.allocator.shared_with(other.pages, num_shared) is not None
            ):
                return other
        return None

    def _awaited_prefix(self, seq: Sequence) -> bytes | str | None:
        """The longest prefix of `seq` that running sequences compute now, if waiting for it saves work."""
        if self._fork_source(seq) is not None:
            return None
        if seq.request.request_id in self._claims and not seq.scores_prompt:
            return seq.request.request_id
        keys = self._shareable_keys(seq)
        awaited = None
        for key in keys[self.allocator.lookup(keys)[1] :]:
            if key not in self._claims:
                break
            awaited = key
        return awaited

    def _admit(self, seq: Sequence, copies: list[tuple[int, int, int]]) -> bool:
        """Gives `seq` a row and pages for all its tokens, shared where possible. False: too few pages now."""
        allocator = self.allocator
        source = self._fork_source(seq)
        if source is not None:
            # The last prompt token is computed again, in a page of its own, for this sample's first token.
            num_cached = seq.num_prompt_tokens - 1
            num_shared = num_cached // allocator.page_size
            shared = allocator.shared_with(source.pages, num_cached)
            assert shared is not None
        else:
            shared, num_shared = allocator.lookup(self._shareable_keys(seq))
            num_cached = num_shared * allocator.page_size
        # A page for each row that can still grow into one, else this one is soon preempted.
        headroom = sum(
            allocator.num_missing(other.pages, other.max_total_tokens - 1) > 0 for other in self.running
        )
        pages = allocator.admit(shared, len(seq.token_ids), seq.max_resident_tokens, headroom)
        if pages is None:
            return False
        seq.pages = pages
        if source is not None and num_cached % allocator.page_size:
            copies += allocator.copy_of_part(source.pages, pages, num_shared)
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = num_cached
            self._num_prompt_tokens += seq.num_prompt_tokens
            self._num_cached_tokens += num_cached
        seq.num_computed_tokens, seq.num_registered_pages = num_cached, num_shared
        seq.row, seq.status = self._free_rows.pop(), SequenceStatus.RUNNING
        insort(self.running, seq, key=lambda other: other.key)
        self._num_waiting -= 1
        keys: list[bytes | str] = [*self._prefix_keys(seq)[num_shared:]]
        if seq.params.n > 1 and source is None:
            keys.append(seq.request.request_id)
        seq.claims = {key for key in keys if key not in self._claims}
        self._claims.update((key, []) for key in seq.claims)
        return True

    # Results

    def _commit_row(self, row: ScheduledRow, sampled: Seq[int], shareable: bool) -> int:
        seq = row.seq
        seq.num_steps_in_flight -= 1
        seq.num_pending_tokens -= row.num_samples
        num_accepted = 0
        if not seq.finished:
            for token in sampled[: row.num_samples]:
                num_accepted += 1
                if seq.append(int(token)):
                    break
            if row.start + row.num_tokens == seq.max_total_tokens:  # max_tokens=0: the prompt was scored
                seq.finish_reason = "length"
        if seq.status is SequenceStatus.RUNNING and shareable:
            self._register(seq, row.start + row.num_tokens + max(0, num_accepted - 1))
        if seq.finish_reason is not None and not seq.finished:
            self._leave(seq, SequenceStatus.FINISHED)
        elif seq.status is not SequenceStatus.RUNNING:
            self._retire(seq)
        return num_accepted

    def _register(self, seq: Sequence, num_committed: int) -> None:
        """Offers the full pages of the first `num_committed` tokens as prefixes; wakes who waits for them."""
        if seq.claims and num_committed >= seq.num_prompt_tokens:
            self._wake(seq, seq.request.request_id)
        if not self.allocator.enable_prefix_caching:
            return
        num_pages = num_committed // self.allocator.page_size
        if num_pages > seq.num_registered_pages:
            self.allocator.extend_keys(seq.page_keys, seq.token_ids, seq.request.cache_salt)
            for page in range(seq.num_registered_pages, num_pages):
                self.allocator.register(seq.pages, page, seq.page_keys[page])
                self._wake(seq, seq.page_keys[page])
            seq.num_registered_pages = num_pages

    def _wake(self, seq: Sequence, key: bytes | str) -> None:
        """Puts those who wait for `seq` to compute `key` back into the queue, at their old place."""
        if key in seq.claims:
            seq.claims.remove(key)
            parked = self._claims.pop(key)
            self._num_parked -= len(parked)
            for waiter in parked:
                heapq.heappush(self._waiting, (waiter.key, waiter))

    def _leave(self, seq: Sequence, status: SequenceStatus) -> None:
        """Takes `seq` out of the run or the queue: preempted or finished."""
        was_waiting = seq.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
        self._num_waiting += (status is SequenceStatus.PREEMPTED) - was_waiting
        seq.status = status
        for key in list(seq.claims):
            self._wake(seq, key)
        self._retire(seq)
        siblings = self._sequences[seq.request.request_id]
        if all(other.finished for other in siblings):
            del self._sequences[seq.request.request_id]

    def _retire(self, seq: Sequence) -> None:
        """Gives back row and pages of a sequence that left, once no step in flight can write to them."""
        if seq.row < 0 or seq.num_steps_in_flight:
            return
        self.allocator.release(seq.pages, seq.max_resident_tokens)
        self._free_rows.append(seq.row)
        seq.pages, seq.row, seq.num_computed_tokens = [], -1, 0
        if seq.status is SequenceStatus.PREEMPTED:
            self._enqueue(seq)
