"""The loop: token ids in, token ids out. Sole owner of device state, of steps in flight, and of clocks.

One `step()` asks the scheduler what runs, dispatches it, and then reads the step before it: the device works
on step n + 1 while the host takes in step n. Sampled tokens stay on the device (`RowState.last_token`), so
the next step never waits for the host.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer import batch as batches
from jaxinfer import kv_cache as kv
from jaxinfer.batch import StepBatch
from jaxinfer.metrics import Metrics, Recording, RowRecord, SequenceRecord, StepRecord, StepTotals, Work
from jaxinfer.outputs import RequestMetrics
from jaxinfer.page_allocator import PageAllocator
from jaxinfer.page_groups import PageGroups
from jaxinfer.programs import forks
from jaxinfer.programs.arguments import PAGE_COPIES
from jaxinfer.programs.background import BackgroundCompiler, give_back_memory
from jaxinfer.programs.buckets import Buckets, Program
from jaxinfer.programs.compile import Programs
from jaxinfer.programs.settings import own_settings
from jaxinfer.request import MAX_ARRAY_ENTRIES, MAX_LOGPROB_ENTRIES, Request, Sequence
from jaxinfer.sampling import logprobs, sample
from jaxinfer.sampling.logits_processors import ProcessorArgs
from jaxinfer.sampling.logprobs import PromptPiece
from jaxinfer.sampling.sample import (
    RowState,
    SampleOutput,
    SamplingBatch,
    SamplingRow,
    Variant,
)
from jaxinfer.scheduler import ScheduledStep, Scheduler, SchedulerConfig, SchedulerStats
from jaxinfer.step import NUM_END_IDS, DecodeLimits
from jaxinfer.text.wording import shown

logger = logging.getLogger(__name__)

COMPILE_THREADS = 2  # that compile at the same time at warm-up


@dataclass(frozen=True)
class EngineConfig:
    """What is static about an engine, beside the model and its cache."""

    scheduler: SchedulerConfig
    buckets: Buckets
    enable_prefix_caching: bool = True
    cache_salt: str = ""  # names the model: pages are shared only under the same salt
    logits_processor_args: Mapping[str, Any] | None = None  # see logits_processors.py


@dataclass(frozen=True)
class Advance:
    """What one committed step brought one sequence."""

    seq: Sequence
    num_new_tokens: int


@dataclass(frozen=True)
class EngineStats(SchedulerStats):
    num_programs: int = 0  # compiled so far
    compile_seconds: float = 0.0
    steps: Mapping[str, StepTotals] = field(default_factory=dict)  # by kind: prefill, decode
    work: Work = field(default_factory=Work)
    num_finished: Mapping[str, int] = field(default_factory=dict)  # sequences, by finish reason
    latency: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)  # Distribution.summary()


class _InFlight(NamedTuple):
    """A step that the device works on, or has done."""

    scheduled: ScheduledStep
    output: SampleOutput
    pieces: list[PromptPiece]
    record: StepRecord
    done: SimpleQueue[float] | None  # gets the time at which the device is done, with a recording


class Engine:
    """Runs requests on one set of weights and one cache. Not thread-safe.

    `bad_word_ids(text)` turns a bad word into the token id sequences to be banned; it is needed only for
    requests that have bad words.

    Args:
      programs: of these weights, a cache, and rows; the first ones may be compiled, or under way.
      background: compiles the rest behind the first token; None: each is compiled when a step needs it.
    """

    def __init__(
        self,
        programs: Programs,
        weights: Any,
        config: EngineConfig,
        *,
        bad_word_ids: Callable[[str], list[list[int]]] | None = None,
        background: BackgroundCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        forks.begin_use()
        config.buckets.check(config.scheduler)
        self.programs, self.weights, self.config, self.clock = programs, weights, config, clock
        self.model_config, self.spec = programs.shapes.config, programs.shapes.spec
        self._bad_word_ids = bad_word_ids
        self._pages_per_row = kv.pages_needed(config.scheduler.max_model_len, self.spec.page_size)
        place = getattr(jax.tree.leaves(weights)[0], "sharding", None)
        self._init_cache = jax.jit(
            partial(kv.init, self.spec), out_shardings=kv.page_format(self.spec, place)
        )
        self._processor_args = ProcessorArgs(config.logits_processor_args)
        self._background, self._asked_for_all = background, background is None
        with own_settings():
            self._allocate()
        self.metrics = Metrics()
        self.recording: Recording | None = None  # set one to keep single steps
        self._start_host_state()

    def _allocate(self) -> None:
        """Device state: the pages of the cache, and what rows keep between steps.

        Waits until it is there. On a CPU a callback in Python leaves the pages unwritten (kv_cache.init): where one is
        left to run behind a step on the device, a process that ends meanwhile ends with SIGABRT.
        """
        self._cache, self._rows = jax.block_until_ready((self._init_cache(), self._init_rows()))

    def _init_rows(self) -> RowState:
        scheduler = self.config.scheduler
        return sample.init_row_state(scheduler.max_num_seqs, scheduler.max_model_len)

    def _start_host_state(self) -> None:
        scheduler, groups = self.config.scheduler, self.spec.kv_groups
        salt = f"{self.config.cache_salt} {self.spec.dtype}"
        pools = [
            PageAllocator(group.num_pages, self.spec.page_size, self.config.enable_prefix_caching, salt=salt)
            for group in groups
        ]
        allocator = PageGroups(pools, [group.window for group in groups], scheduler.max_step_tokens)
        self.scheduler = Scheduler(self.config.scheduler, allocator)
        self._in_flight: deque[_InFlight] = deque()
        self._sampling_key: tuple[Any, ...] | None = None
        self._sampling: tuple[dict[str, Any], SamplingBatch | None] = ({}, None)
        self._unfinished: dict[Sequence, SamplingRow] = {}

    # Requests

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request.

        Raises:
          ValueError: it can never run here (too long, token ids outside the vocabulary, programs that
            `strict_compile` forbids to compile); the message says why.
        """
        params, vocab = request.params, self.model_config.vocab_size
        self._check_ids("prompt_token_ids", request.prompt_token_ids, vocab)
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias", "logprob_token_ids"):
            self._check_ids(name, getattr(params, name) or (), vocab)
        self._check_ids("end_token_ids", request.end_token_ids, vocab)
        if params.extra_args:
            if not self.programs.logits_processors:
                raise ValueError("extra_args need LLM(logits_processors=[...]), and this engine has none")
            self._processor_args.check(params.extra_args)
        self._check_logprob_entries(request)
        words = [ids for word in params.bad_words or () for ids in self._ban(word)]
        ends = (frozenset() if params.ignore_eos else request.end_token_ids) | set(
            params.stop_token_ids or ()
        )
        row = SamplingRow(params, request.seed, 0, len(request.prompt_token_ids), tuple(sorted(ends)), words)
        if self.programs.strict and self.programs.warm:
            self._check_declared(row, request)
        sequences = self.scheduler.add(request)
        self._processor_args.learn(params.extra_args or {})
        for seq in sequences:
            logprobs.begin(seq)
            seq.metrics = RequestMetrics(arrival_time=request.arrival_time)
            self._unfinished[seq] = row._replace(sample_index=seq.index)
        return sequences

    @staticmethod
    def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
        wrong = [i for i in ids if not 0 <= i < vocab_size]
        if wrong:
            raise ValueError(f"{name} has {wrong[0]}; token ids of this model are 0 to {vocab_size - 1}")

    def _check_logprob_entries(self, request: Request) -> None:
        params, vocab, prompt = request.params, self.model_config.vocab_size, len(request.prompt_token_ids)
        most = (
            self.config.scheduler.max_model_len - prompt if params.max_tokens is None else params.max_tokens
        )
        limit = MAX_LOGPROB_ENTRIES if request.arrays is None else MAX_ARRAY_ENTRIES
        for name, k, tokens in (
            ("logprobs", request.num_logprobs, params.n * most),
            ("prompt_logprobs", request.num_prompt_logprobs, prompt),
        ):
            entries = vocab if k == -1 else k or 0
            if (k == -1 or request.arrays is not None) and tokens * entries > limit:
                raise ValueError(
                    f"{name}={k} asks for {tokens} tokens x {entries} entries; at most {limit} are "
                    "allowed: use logprob_token_ids, fewer tokens, or at most 20 entries per token"
                )

    def _check_declared(self, row: SamplingRow, request: Request) -> None:
        """Refuses, before it disturbs others, a request whose programs are none of those of the warm-up."""
        params, buckets, vocab = row.params, self.config.buckets, self.model_config.vocab_size
        scored = request.num_prompt_logprobs
        variant = buckets.variant(sample.variant_of([row]))
        needs = {
            f"sampling variant {variant!r} (compiled: {list(buckets.variants)})": variant
            not in buckets.variants,
            "logprobs": request.num_logprobs is not None,
            f"prompt_logprobs={scored} (compiled: {list(buckets.prompt_logprobs)})": (
                scored is not None and logprobs.width([scored], vocab) not in buckets.prompt_logprobs
            ),
            "extra_args that are not in logits_processor_args": not self._processor_args.knows(
                params.extra_args or {}
            ),
        }
        for need, missing in needs.items():
            if missing:
                raise ValueError(
                    f"the request needs programs for {need}, which warm-up did not compile, and "
                    "strict_compile=True forbids to compile them now"
                )

    def _ban(self, word: str) -> list[list[int]]:
        if self._bad_word_ids is None:
            raise ValueError(f"bad_words={shown(word)} needs a tokenizer, and this engine has none")
        return self._bad_word_ids(word)

    def finish(self, seq: Sequence, reason: str, stop_reason: Any, num_output_tokens: int) -> None:
        """Ends a sequence from outside (a stop string), keeping its first `num_output_tokens` tokens."""
        self.scheduler.finish(seq, reason, stop_reason, num_output_tokens)
        logprobs.truncate(seq, num_output_tokens)
        self._settle(seq, self.clock())

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends what is unfinished of a request with finish_reason "abort", and returns it."""
        now, aborted = self.clock(), self.scheduler.abort(request_id)
        for seq in aborted:
            self._settle(seq, now)
        return aborted

    def stats(self) -> EngineStats:
        return EngineStats(
            **vars(self.scheduler.stats()),
            num_programs=len(self.programs),
            compile_seconds=self.programs.compile_seconds,
            steps={kind: replace(totals) for kind, totals in self.metrics.steps.items()},
            work=replace(self.metrics.work),
            num_finished=dict(self.metrics.num_finished),
            latency={name: found.summary() for name, found in self.metrics.latency.items()},
        )

    def update_weights(self, weights: Any) -> None:
        """Runs on other weights from now on: nothing compiles, and cached prefixes are forgotten.

        Args:
          weights: a tree of the structure, shapes and dtypes of the present one; its leaves are put where
            the present ones are.

        Raises:
          RuntimeError: requests are unfinished (steps in flight behind the end of all of them are no matter).
          ValueError: a leaf is missing, surplus, or of another shape or dtype; nothing has changed then.
        """
        self.drain()
        if self.has_unfinished:
            raise RuntimeError(
                "update_weights: requests are unfinished; let them finish, or abort them first"
            )
        old, structure = jax.tree_util.tree_flatten_with_path(self.weights)
        new = dict(jax.tree_util.tree_flatten_with_path(weights)[0])
        for path, leaf in old:
            name = jax.tree_util.keystr(path)
            if path not in new:
                raise ValueError(f"update_weights: the tree has no leaf {name}")
            shapes = [_described(x) for x in (new[path], leaf)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"update_weights: {name} is {shapes[0]}, this model has {shapes[1]}")
        if jax.tree_util.tree_structure(weights) != structure:  # type: ignore[operator]
            surplus = sorted(jax.tree_util.keystr(path) for path in new.keys() - dict(old).keys())
            raise ValueError(
                f"update_weights: the tree differs from this model's: {surplus or 'other nodes'}"
            )
        with own_settings():
            self.weights = jax.tree.map(
                lambda x, present: jax.device_put(x, getattr(present, "sharding", None)),
                weights,
                self.weights,
            )
        self.scheduler.reset_prefix_cache()

    # The loop

    def step(self) -> list[Advance]:
        """Dispatches the next step and takes in the one before it: what that brought each of its sequences.

        Whatever is raised here (Ctrl-C too) ends every unfinished request with "abort" and leaves an engine
        that works.
        """
        forks.check()
        try:
            with own_settings():
                return self._step()
        except BaseException as error:
            self._reset(error)
            raise

    def _step(self) -> list[Advance]:
        begun = self.clock()
        if self._in_flight and self.programs.under_way:
            # The next step might wait for its program here, and the token that is there with it.
            return self._commit(self._in_flight.popleft())
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self._dispatch(scheduled, begun)
        if len(self._in_flight) > (scheduled is not None):
            return self._commit(self._in_flight.popleft())
        return []

    def drain(self) -> None:
        """Once every request has ended, takes in the surplus steps in flight: their pages are given back.

        Does nothing while a request is unfinished.
        """
        forks.check()
        try:
            while self._in_flight and not self._unfinished:
                with own_settings():
                    self._commit(self._in_flight.popleft())
        except BaseException as error:
            self._reset(error)
            raise

    def _dispatch(self, scheduled: ScheduledStep, begun: float) -> None:
        self._prepare_pages_and_rows(scheduled, begun)
        program, sampling_batch = self._program(scheduled)
        rows = scheduled.rows
        batch = self._pack(
            program,
            [
                (
                    (0,) if row.from_row else row.seq.token_ids[row.start : row.start + row.num_tokens],
                    row.start,
                    row.seq.pages,
                )
                for row in rows
            ],
            row_ids=[row.seq.row for row in rows],
            from_row=[row.from_row for row in rows],
            samples=[row.samples for row in rows],
        )
        limits = self._limits(scheduled, program) if program.num_steps > 1 else None
        arguments = (self.weights, self._cache, self._rows, batch, sampling_batch, limits)
        packed = self.clock()
        executable = self.programs.get(program)
        compile_s = self.clock() - packed
        output, self._cache, self._rows = executable(*arguments)
        pieces: list[PromptPiece] = []
        if logprobs.scores_prompt(scheduled):
            pieces = logprobs.dispatch_prompt_scores(
                scheduled,
                output.hidden,
                self.weights,
                self.model_config.vocab_size,
                program.tile,
                self.programs.get,
            )
        record = StepRecord(
            kind=program.kind,
            num_slots=program.num_tokens * program.num_steps,
            num_steps=program.num_steps,
            num_rows=len(rows),
            pages_used=self.scheduler.allocator.num_used,
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting,
            begun=begun,
            dispatched=self.clock(),
            compile_s=compile_s,
        )
        done = None if self.recording is None else self.recording.watch(output.sampled.tokens)
        self._in_flight.append(_InFlight(scheduled, output.sampled, pieces, record, done))

    def _pack(self, program: Program, rows: list[Any], **per_row: Any) -> StepBatch:
        return batches.pack(
            rows,
            page_size=self.spec.page_size,
            num_tokens=program.num_tokens,
            num_rows=program.num_rows,
            pages_per_row=self._pages_per_row,
            spare_row=self.config.scheduler.max_num_seqs,
            max_q_len=1 if program.kind == "decode" else program.num_tokens,
            tile=program.tile,
            **per_row,
        )

    def _prepare_pages_and_rows(self, scheduled: ScheduledStep, now: float) -> None:
        for begin in range(0, len(scheduled.page_copies), PAGE_COPIES):
            pairs = np.zeros((2, len(self.spec.kv_groups), PAGE_COPIES), np.int32)
            for i, (group, source, target) in enumerate(scheduled.page_copies[begin : begin + PAGE_COPIES]):
                pairs[:, group, i] = source, target
            self._cache = self.programs.helper(kv.copy_pages)(self._cache, *map(tuple, pairs))
        for seq in scheduled.admitted:
            assert seq.metrics is not None
            if seq.metrics.first_scheduled_time is None:
                seq.metrics.first_scheduled_time = now
            if seq.params.needs_history or self.programs.logits_processors:
                padded = np.zeros(self.config.scheduler.max_model_len, np.int32)
                padded[: len(seq.token_ids)] = seq.token_ids
                row = (np.int32(seq.row), padded, np.int32(len(seq.token_ids)))
                self._rows = self.programs.helper(sample.set_row)(self._rows, *row)

    def _program(self, scheduled: ScheduledStep) -> tuple[Program, SamplingBatch | None]:
        """The program that runs a step, and its sampling parameters (None for greedy rows)."""
        seqs = tuple(row.seq for row in scheduled.rows)
        kind, num_tokens, num_rows = self.config.buckets.shape(
            scheduled.num_tokens, len(seqs), scheduled.num_steps, logprobs.scores_prompt(scheduled)
        )
        # While the same rows run, their parameters stay on the device.
        if self._sampling_key != (seqs, num_rows):
            known = [self._unfinished[seq] for seq in seqs]
            variant = self.config.buckets.variant(sample.variant_of(known))
            options, batch = self._sampling_batch(known, num_rows, variant)
            self._sampling_key, self._sampling = (seqs, num_rows), (options, jax.device_put(batch))
        options, on_device = self._sampling
        wanted = [k for seq in seqs if (k := seq.request.num_logprobs) is not None]
        num_logprobs = logprobs.width(wanted, self.model_config.vocab_size) if wanted else None
        program = Program(
            kind,
            num_tokens,
            num_rows,
            scheduled.num_steps,
            num_logprobs=num_logprobs,
            tile=self.config.buckets.tile,
            **options,
        )
        return program, on_device

    def _sampling_batch(
        self, rows: list[SamplingRow], num_rows: int, variant: Variant
    ) -> tuple[dict[str, Any], SamplingBatch | None]:
        """What rows ask of a step beside its shape: the static part, fields of Program, and the arrays."""
        args = self._processor_args
        if variant == "greedy" and not args.signature and all(not r.params.logprob_token_ids for r in rows):
            return {"variant": variant}, None
        batch = SamplingBatch.from_rows(
            rows,
            num_rows,
            self.model_config.vocab_size,
            args.batch([row.params.extra_args for row in rows], num_rows),
        )
        options: dict[str, Any] = {"variant": variant, "processor_args": args.signature}
        if batch.extras is not None:
            options["extras_shape"] = batch.extras.list_lengths
        if batch.label_ids is not None:
            options["num_labels"] = batch.label_ids.shape[1]
        return options, batch

    def _limits(self, scheduled: ScheduledStep, program: Program) -> DecodeLimits:
        end_ids = np.full((program.num_rows, NUM_END_IDS), self.model_config.vocab_size, np.int32)
        end_from = np.zeros(program.num_rows, np.int32)
        last_position = np.zeros(program.num_rows, np.int32)
        for b, row in enumerate(scheduled.rows):
            # More end ids than there is room for: the host sees those, and drops what follows them.
            ends = self._unfinished[row.seq].end_ids[:NUM_END_IDS]
            end_ids[b, : len(ends)] = ends
            end_from[b] = row.seq.num_prompt_tokens + row.seq.params.min_tokens
            last_position[b] = row.start + row.num_samples
        return DecodeLimits(end_ids=end_ids, end_from=end_from, last_position=last_position)  # type: ignore[arg-type]

    def _commit(self, in_flight: _InFlight) -> list[Advance]:
        scheduled, output, pieces, record, done = in_flight
        record.late, record.read = output.tokens.is_ready(), self.clock()  # type: ignore[attr-defined]
        # The one read of a step; arrays [k, B, ...] of what was drawn, [S, ...] of prompt tokens.
        host: SampleOutput
        host, scores = jax.device_get((output, [piece.output for piece in pieces]))
        record.done = self.clock() if done is None else done.get()
        for piece, piece_scores in zip(pieces, scores, strict=True):
            logprobs.take_prompt_scores(piece, piece_scores)
        num_rows, peak = len(scheduled.rows), host.peak
        assert isinstance(peak, np.ndarray)
        # A NaN in a chunk may reach tokens before it too (0 x NaN, where attention masks): no prefix for others.
        shareable = (peak < np.inf).all(axis=0)[:num_rows].tolist()
        accepted = self.scheduler.commit(scheduled, _drawn(host.tokens, peak, num_rows), shareable)
        now = self.clock()
        advances = []
        for b, (row, count) in enumerate(zip(scheduled.rows, accepted, strict=True)):
            seq, metrics = row.seq, row.seq.metrics
            assert metrics is not None
            if count:
                if metrics.first_token_time is None:
                    metrics.first_token_time = now
                metrics.last_token_time = now
                metrics.token_times.append(now)
                metrics.num_output_tokens = seq.num_output_tokens
                if seq.request.num_logprobs is not None:
                    logprobs.take_logprobs(seq, host, b, count)
            if count < row.num_samples and not seq.finished:
                why = sample.why_no_token(float(peak[count, b]))
                seq.error = seq.error or f"output token {seq.num_output_tokens + 1} cannot be drawn: {why}"
            failed = seq.error is not None and seq in self._unfinished
            if failed:
                self.scheduler.finish(seq, "error")
            if seq.finished:
                self._settle(seq, now)
            if count or failed or (seq.finished and row.num_samples == 0):
                advances.append(Advance(seq, count))
        self._account(scheduled, accepted, record)
        if not self._asked_for_all and any(accepted):
            self._compile_behind(self._sampling[0]["variant"])
        return advances

    def _account(self, scheduled: ScheduledStep, accepted: list[int], record: StepRecord) -> None:
        """Takes a committed step into the totals, and into the recording if there is one."""
        before = self.metrics.work.num_tokens
        self.metrics.work.add_step(
            (row.start, row.num_tokens, count)
            for row, count in zip(scheduled.rows, accepted, strict=True)
            if count or not row.num_samples  # else it had ended: what it drew is surplus
        )
        record.num_tokens = self.metrics.work.num_tokens - before
        record.committed = self.clock()
        self.metrics.add_step(record)
        if self.recording is not None:
            record.rows = tuple(
                RowRecord(_name(row.seq), row.start, row.num_tokens, count)
                for row, count in zip(scheduled.rows, accepted, strict=True)
            )
            self.recording.steps.append(record)

    def _settle(self, seq: Sequence, now: float) -> None:
        """A sequence has ended: its times are final, and nothing is kept of it.

        Comes twice where a stop string shows in the tokens that ended the sequence: it gets shorter once more.
        """
        assert seq.metrics is not None
        seq.metrics.num_output_tokens = seq.num_output_tokens
        if self._unfinished.pop(seq, None) is not None:
            seq.metrics.finished_time = now
            seq.metrics.num_preemptions = seq.num_preemptions
            self.metrics.add_request(seq.metrics, seq.finish_reason)
            if self.recording is not None:
                self.recording.sequences.append(SequenceRecord(_name(seq), seq.metrics, seq.finish_reason))

    def _reset(self, error: BaseException) -> None:
        """After an exception in the middle of a step no host record can be trusted: start them anew.

        Nor can device state: what failed on the device is found out late, and the cache may be its result. Ctrl-C
        is no failure of the device; then only donated buffers are gone, if it came between a dispatch and its
        result.
        """
        now = self.clock()
        for seq in list(self._unfinished):
            seq.finish_reason = seq.finish_reason or "abort"
            self._settle(seq, now)
        self._start_host_state()
        gone = any(leaf.is_deleted() for leaf in jax.tree.leaves((self._cache, self._rows)))
        if gone or not isinstance(error, KeyboardInterrupt):
            with own_settings():
                self._allocate()

    # Programs

    def warmup(self, progress: Callable[[Program], None] = lambda program: None) -> None:
        """Compiles every program of the buckets, and the helpers beside them; after it nothing compiles.

        What rows with penalties, bans, logprobs or labels need is compiled when first asked for, and counted;
        with `strict_compile` such requests are refused after the warm-up.
        """
        programs = self._declared_programs()
        logger.info("programs: %s", ", ".join(map(str, programs)))
        with ThreadPoolExecutor(min(COMPILE_THREADS, os.cpu_count() or 1)) as pool:
            jobs = {pool.submit(self.programs.get, program): program for program in programs}
            try:
                for job in as_completed(jobs):
                    job.result()
                    progress(jobs[job])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for function in self.programs.shapes.of_helpers():
            self.programs.helper(function)
        give_back_memory()
        self.programs.warm = True

    def _declared_programs(self) -> list[Program]:
        """All programs of the buckets, the ones needed first at the front."""
        return self.config.buckets.programs(self._processor_args.signature)

    def _compile_behind(self, variant: Variant) -> None:
        """Asks for what `warmup` would compile, programs of `variant` first."""
        assert self._background is not None
        self._asked_for_all = True
        self._background.add(sorted(self._declared_programs(), key=lambda p: p.variant != variant))

    def close(self, *, weights: bool = True) -> None:
        """Frees device memory: programs, cache, row state, and the weights unless they belong to somebody else.

        Waits for the program that is compiled in the background: what compiling takes is free then too.
        """
        if self._background is not None:
            self._background.close()
        for step in self._in_flight:  # a device must not be at work when the process ends
            with suppress(Exception):  # nobody asks for its result any more
                jax.block_until_ready(step.output)
        self.programs.close()
        trees = (self._cache, self._rows, self.weights) if weights else (self._cache, self._rows)
        for leaf in jax.tree.leaves(trees):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()


def _drawn(tokens: Any, peak: np.ndarray, num_rows: int) -> list[list[int]]:
    """What each of the first rows drew in a step, up to the first that is no token: see `SampleOutput.peak`.

    tokens, peak: [k, B].
    """
    tokens = tokens.T[:num_rows].tolist()
    is_token = np.isfinite(peak)
    if not is_token.all():
        counts = np.cumprod(is_token, axis=0).sum(axis=0)
        tokens = [ids[:count] for ids, count in zip(tokens, counts, strict=False)]
    return tokens


def _described(leaf: Any) -> str:
    """dtype[shape] of an array, the type of anything else."""
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array else f"a {type(leaf).__name__}"


def _name(seq: Sequence) -> str:
    """Of a sequence, for people."""
    return seq.request.request_id if seq.params.n == 1 else f"{seq.request.request_id}.{seq.index}"
