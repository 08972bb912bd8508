import random
import time
from collections import deque
from dataclasses import dataclass, field

import pytest
from fake_device import FakeDevice, check_no_page_shared_for_writing, expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.page_allocator import PageAllocator
from jaxinfer.page_groups import PageGroups, most_pages
from jaxinfer.request import Request, Sequence
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.scheduler import RequestTooLong, ScheduledStep, Scheduler, SchedulerConfig

VOCAB = 50


@dataclass
class Rig:
    """A scheduler with a fake device that runs `ahead` steps before their results are read."""

    num_pages: int = 65
    page_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    max_num_partial_prefills: int = 1
    decode_steps: int = 1
    enable_prefix_caching: bool = True
    vocab: int = VOCAB
    masks_stops: bool = True
    ahead: int = 0
    windows: tuple[int | None, ...] = (None,)  # of KV groups
    window_pages: int = 0  # of the pool of each group with a window
    steps: list[ScheduledStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_num_partial_prefills=self.max_num_partial_prefills,
            decode_steps=self.decode_steps,
        )
        self.allocator = PageAllocator(self.num_pages, self.page_size, self.enable_prefix_caching)
        pools = [self.allocator]
        for _ in self.windows[1:]:
            pools.append(PageAllocator(self.window_pages, self.page_size, self.enable_prefix_caching))
        self.groups = PageGroups(pools, self.windows, config.max_step_tokens)
        self.scheduler = Scheduler(config, self.groups)
        self.device = FakeDevice(
            max(self.num_pages, self.window_pages),
            self.page_size,
            self.max_num_seqs,
            self.vocab,
            self.masks_stops,
            self.windows,
        )
        self.in_flight: deque[tuple[ScheduledStep, list[list[int]]]] = deque()

    def add(self, request_id: str, prompt: list[int], priority: int = 0, **params) -> list[Sequence]:
        request = Request(
            request_id, tuple(prompt), SamplingParams(**params), frozenset([0]), priority=priority
        )
        return self.scheduler.add(request)

    def step(self) -> ScheduledStep | None:
        """One turn of an engine's loop: dispatch, then read the oldest result if more than `ahead` are in flight."""
        step = self.scheduler.schedule()
        if step is not None:
            check_no_page_shared_for_writing(self.scheduler)
            self.steps.append(step)
            self.in_flight.append((step, self.device.run(step)))
        if self.in_flight and (step is None or len(self.in_flight) > self.ahead):
            self.scheduler.commit(*self.in_flight.popleft())
        return step

    def dispatch(self) -> ScheduledStep:
        """Schedules a step that is never run: the test makes up its result."""
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                break
            was_in_flight = bool(self.in_flight)
            assert self.step() or was_in_flight, "nothing can ever run"
        assert not self.scheduler.has_unfinished, f"not finished after {max_steps} steps"
        self.check_idle()

    def check_idle(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
        assert not self.scheduler._claims and not self.scheduler._num_parked
        assert sorted(self.scheduler._free_rows) == list(range(self.max_num_seqs))
        self.groups.check_invariants()

    def expected(self, seq: Sequence) -> tuple[list[int], str]:
        capacity = (self.num_pages - 1) * self.page_size
        return expected_tokens(seq.request, seq.index, self.vocab, min(self.max_model_len, capacity + 1))

    def check_outputs(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            assert (seq.output_token_ids, seq.finish_reason) == self.expected(seq), seq.request.request_id


def shapes(step: ScheduledStep | None) -> list[tuple[str, int, int, int]]:
    assert step is not None
    return [(row.seq.request.request_id, row.start, row.num_tokens, row.num_samples) for row in step.rows]


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [start + i % 40 for i in range(length)]


# Who runs, how many tokens


def test_prompt_chunks_ride_behind_decode_rows_under_one_budget():
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", prompt_of(6), max_tokens=9, ignore_eos=True)
    rig.add("b", prompt_of(12, start=5), max_tokens=2, ignore_eos=True)
    assert shapes(rig.step()) == [("a", 0, 6, 1), ("b", 0, 2, 0)]
    assert shapes(rig.step()) == [("a", 6, 1, 1), ("b", 2, 7, 0)]
    assert shapes(rig.step()) == [("a", 7, 1, 1), ("b", 9, 3, 1)]
    assert shapes(rig.step()) == [("a", 8, 1, 1), ("b", 12, 1, 1)]
    assert shapes(rig.step()) == [("a", 9, 1, 1)]


def test_rows_with_one_query_token_stand_first():
    rig = Rig()
    rig.add("long", prompt_of(5), max_tokens=1)
    rig.add("one", [7], max_tokens=1)
    assert shapes(rig.step()) == [("one", 0, 1, 1), ("long", 0, 5, 1)]


def test_lower_priority_value_first_then_order_of_arrival():
    rig = Rig(max_num_seqs=1)
    seqs = rig.add("a", [1], max_tokens=1) + rig.add("b", [2], max_tokens=1)
    seqs += rig.add("urgent", [3], priority=-1, max_tokens=1)
    rig.run()
    assert [step.rows[0].seq.request.request_id for step in rig.steps] == ["urgent", "a", "b"]
    rig.check_outputs(seqs)


@pytest.mark.parametrize(("partial", "chunks"), [(1, {"a": 8}), (2, {"a": 4, "b": 4}), (4, {"a": 4, "b": 4})])
def test_max_num_partial_prefills_shares_the_budget(partial, chunks):
    """With room for four, two prompts get a quarter each and the first one the rest."""
    rig = Rig(max_num_batched_tokens=8, max_num_partial_prefills=partial)
    rig.add("a", prompt_of(20), max_tokens=1)
    rig.add("b", prompt_of(20, start=5), max_tokens=1)
    step = rig.step()
    assert step is not None and step.num_tokens == 8
    got = {row.seq.request.request_id: row.num_tokens for row in step.rows}
    assert got == (chunks if partial < 4 else {"a": 6, "b": 2})


def test_row_is_stable_while_running_and_reused_afterwards():
    rig = Rig(max_num_seqs=2)
    rig.add("a", [1, 2], max_tokens=1)
    long, late = rig.add("b", [2, 3], max_tokens=4, ignore_eos=True) + rig.add("c", [3, 4], max_tokens=2)
    rig.step()
    assert long.row == 1 and late.row == -1
    step = rig.step()
    assert step is not None and step.admitted == (late,)
    assert long.row == 1 and late.row == 0
    rig.run()


# Multi-step decode and dispatch ahead


def test_k_steps_only_when_every_row_decodes_and_nothing_waits():
    rig = Rig(decode_steps=4, max_num_batched_tokens=4, max_num_seqs=2)
    rig.add("a", prompt_of(6), max_tokens=20, ignore_eos=True)
    ks = []
    for number in range(8):
        if number == 4:
            rig.add("b", [9], max_tokens=1)
        step = rig.step()
        assert step is not None
        ks.append(step.num_steps)
    # chunk, chunk, then k; "b" waits, is admitted with k = 1, leaves again
    assert ks == [1, 1, 4, 4, 1, 4, 4, 1]
    rig.run()
    assert all(row.seq.pages == [] for step in rig.steps for row in step.rows)


def test_k_falls_to_one_when_pages_for_k_tokens_are_missing():
    rig = Rig(decode_steps=8, num_pages=5, page_size=2, max_num_seqs=2)
    seqs = rig.add("a", [1, 2], max_tokens=7, ignore_eos=True)
    rig.run()
    assert {step.num_steps for step in rig.steps} == {1, 8}, "fits alone: 8 slots"
    rig = Rig(decode_steps=8, num_pages=6, page_size=2, max_num_seqs=2)
    seqs = rig.add("a", [1, 2], max_tokens=7, ignore_eos=True) + rig.add(
        "b", [2, 3], max_tokens=7, ignore_eos=True
    )
    rig.run()
    rig.check_outputs(seqs)
    assert rig.steps[1].num_steps == 1 and rig.scheduler.stats().num_preemptions == 1


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("masks_stops", [True, False])
def test_k_does_not_change_the_tokens(ahead, masks_stops):
    outputs = []
    for k in (1, 8):
        rig = Rig(decode_steps=k, ahead=ahead, vocab=11, masks_stops=masks_stops)
        seqs = [rig.add(str(i), prompt_of(3 + i, i + 1), max_tokens=5 + 4 * i)[0] for i in range(4)]
        rig.run()
        rig.check_outputs(seqs)
        outputs.append([seq.output_token_ids for seq in seqs])
    assert outputs[0] == outputs[1]
    assert any(len(ids) < 5 + 4 * i for i, ids in enumerate(outputs[0])), "some must end early by an end id"


def test_next_step_is_scheduled_before_the_last_one_is_read():
    rig = Rig(ahead=1)
    (seq,) = rig.add("a", [1, 2, 3], max_tokens=4, ignore_eos=True)
    scheduler = rig.scheduler
    first, second = rig.dispatch(), rig.dispatch()
    assert shapes(first) == [("a", 0, 3, 1)] and shapes(second) == [("a", 3, 1, 1)]
    assert not first.rows[0].from_row and second.rows[0].from_row
    assert seq.output_token_ids == [] and seq.num_pending_tokens == 2
    assert scheduler.commit(first, [[7]]) == [1]
    assert seq.output_token_ids == [7]


def test_nothing_is_scheduled_past_a_length_that_tokens_in_flight_reach():
    rig = Rig()
    rig.add("a", [1, 2, 3], max_tokens=2)
    assert rig.scheduler.schedule() and rig.scheduler.schedule()
    assert rig.scheduler.schedule() is None


def test_surplus_token_past_a_stop_is_dropped_and_pages_wait_for_the_step_in_flight():
    rig = Rig()
    (seq,) = rig.add("a", [1, 2, 3], max_tokens=9)
    first, second = rig.dispatch(), rig.dispatch()
    assert rig.scheduler.commit(first, [[0]]) == [1]
    assert seq.finish_reason == "stop" and rig.allocator.num_used == 1 and seq.row == 0
    assert rig.scheduler.commit(second, [[5]]) == [0]
    assert seq.output_token_ids == [0]
    rig.check_idle()


def test_steps_are_committed_in_order():
    rig = Rig()
    rig.add("a", [1, 2, 3], max_tokens=9)
    rig.dispatch()
    second = rig.dispatch()
    with pytest.raises(ValueError, match="in the order"):
        rig.scheduler.commit(second, [[5]])


# Lengths


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [
        (60, 4, True),
        (60, 5, False),
        (64, 0, True),
        (64, 1, False),
        (65, 0, False),
        (63, None, True),
        (64, None, False),
    ],
)
def test_longest_request_of_the_model(prompt, max_tokens, fits):
    """C94: exactly the documented count at the limit, and a refusal with the numbers past it."""
    rig = Rig(max_model_len=64)
    neighbour = rig.add("neighbour", [1, 2], max_tokens=3)
    if fits:
        (seq,) = rig.add("a", prompt_of(prompt), max_tokens=max_tokens, ignore_eos=True)
        rig.run()
        assert seq.num_output_tokens == (64 - prompt if max_tokens is None else max_tokens)
        assert seq.finish_reason == "length"
    else:
        with pytest.raises(
            RequestTooLong, match=f"prompt of {prompt} tokens .*max_tokens={max_tokens}.*=64 .*256"
        ):
            rig.add("a", prompt_of(prompt), max_tokens=max_tokens)
        rig.run()
    rig.check_outputs(neighbour)


def test_request_over_the_whole_pool_is_refused_at_submit():
    """C91: 12 pages of 16; the last token sampled needs no slot."""
    rig = Rig(num_pages=13, page_size=16, max_model_len=1024, max_num_batched_tokens=64)
    for prompt, max_tokens in [(300, 1), (150, 44), (193, 0), (193, None)]:
        with pytest.raises(RequestTooLong, match=f"prompt of {prompt} .*pool of 192 tokens"):
            rig.add("a", prompt_of(prompt), max_tokens=max_tokens)
    seqs = rig.add("a", prompt_of(150), max_tokens=43, ignore_eos=True)
    rig.run()
    seqs += rig.add("b", prompt_of(190, 3), max_tokens=None, ignore_eos=True)  # ends when the pool is full
    rig.run()
    rig.check_outputs(seqs)


def test_request_id_in_use_is_refused():
    rig = Rig()
    rig.add("a", [1])
    with pytest.raises(ValueError, match="'a' is already in use"):
        rig.add("a", [1])


# Preemption


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_requests_come_back_whole(ahead, enable_prefix_caching):
    """C09: pool too small for all; each output equals its solo run, no token twice, none missing."""
    rig = Rig(
        num_pages=13, page_size=16, max_num_batched_tokens=32, max_model_len=128, ahead=ahead,
        enable_prefix_caching=enable_prefix_caching,
    )  # fmt: skip
    seqs = [rig.add(str(i), prompt_of(30, i + 1), max_tokens=60, ignore_eos=True)[0] for i in range(6)]
    rig.run()
    rig.check_outputs(seqs)
    assert [seq.num_output_tokens for seq in seqs] == [60] * 6
    assert rig.scheduler.stats().num_preemptions > 0
    assert seqs[0].num_preemptions == 0, "the first in the order is never preempted"


def test_the_youngest_is_preempted_and_resumes_without_sampling_again():
    rig = Rig(
        num_pages=8, page_size=2, max_num_batched_tokens=8, max_model_len=14, enable_prefix_caching=False
    )
    old = rig.add("old", [1, 2, 3, 4], max_tokens=8, ignore_eos=True)[0]
    young = rig.add("young", [5, 6, 7, 8], max_tokens=6, ignore_eos=True)[0]
    rig.run()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    rig.check_outputs([old, young])
    resumed = [step for step in rig.steps if young in step.admitted][1]
    row = next(row for row in resumed.rows if row.seq is young)
    assert row.start == 0 and row.num_tokens > 4 and row.num_samples == 1, "prompt and output as one prompt"
    sampled = sum(row.num_samples for step in rig.steps for row in step.rows if row.seq is young)
    assert sampled == 6


def test_rows_that_can_grow_no_more_need_no_pages_kept_for_them():
    # Four pages hold two whole sequences of 8 tokens (the last of which needs no slot): the second must not wait.
    rig = Rig(num_pages=5, page_size=4, max_num_seqs=2, max_num_batched_tokens=16)
    first = rig.add("a", [1] * 6, max_tokens=3)
    second = rig.add("b", [2] * 6, max_tokens=3)
    rig.step()
    assert first[0].row >= 0 and second[0].row >= 0


def test_no_admission_into_the_pages_that_running_rows_are_about_to_need():
    """Else a newcomer is preempted in the next step, and its prompt is computed for nothing."""
    rig = Rig(num_pages=7, page_size=2)
    old = rig.add("old", [1, 2, 3, 4], max_tokens=8, ignore_eos=True)
    young = rig.add("young", prompt_of(7, 5), max_tokens=4, ignore_eos=True)
    assert shapes(rig.step()) == [("old", 0, 4, 1)], (
        "4 pages are free, 4 are needed, 1 is kept for the other row"
    )
    rig.run()
    rig.check_outputs(old + young)
    assert rig.scheduler.stats().num_preemptions == 0


# n > 1


@pytest.mark.parametrize(
    ("prompt", "shared_pages", "copied"), [(1, 0, 0), (4, 0, 3), (5, 1, 0), (6, 1, 3), (8, 1, 3), (9, 2, 0)]
)
def test_samples_share_the_prompts_pages_and_copy_only_the_last(prompt, shared_pages, copied):
    rig = Rig(enable_prefix_caching=False)
    seqs = rig.add("a", prompt_of(prompt), n=4, max_tokens=6, ignore_eos=True)
    rig.step()
    step = rig.step()
    assert step is not None and len(step.page_copies) == copied
    first = seqs[0].pages[0][:shared_pages]
    for other in seqs[1:]:
        assert other.pages[0][:shared_pages] == first
    assert [rig.allocator.ref_count(page) for page in first] == [4] * shared_pages
    rig.run()
    rig.check_outputs(seqs)
    chunks = [row.num_tokens for step in rig.steps for row in step.rows if row.start < prompt]
    assert sum(chunks) == prompt + 3, "the prompt once, and its last token once more for each other sample"


@pytest.mark.parametrize("ahead", [0, 1])
def test_more_samples_than_rows_compute_the_prompt_once_while_one_of_them_runs(ahead):
    rig = Rig(max_num_seqs=3, ahead=ahead)
    seqs = rig.add("a", prompt_of(10), n=10, max_tokens=20)
    rig.run()
    rig.check_outputs(seqs)
    assert len({tuple(seq.output_token_ids) for seq in seqs}) > 5, "samples differ"


# Prefix cache


def test_second_request_computes_only_what_is_not_cached():
    rig = Rig(page_size=4)
    first = rig.add("a", prompt_of(14), max_tokens=2)
    rig.run()
    computed = rig.device.num_computed
    second = rig.add("b", prompt_of(14), max_tokens=1) + rig.add("c", prompt_of(12), max_tokens=1)
    rig.run()
    assert [seq.num_cached_tokens for seq in first + second] == [0, 12, 8], (
        "the last prompt token is computed"
    )
    assert rig.device.num_computed - computed == 2 + 4
    rig.check_outputs(first + second)


def test_output_pages_serve_the_next_turn_of_a_chat():
    rig = Rig(page_size=4)
    (first,) = rig.add("a", prompt_of(6), max_tokens=8, ignore_eos=True)
    rig.run()
    (second,) = rig.add("b", [*first.token_ids, 1, 2, 3], max_tokens=2)
    rig.run()
    assert second.num_cached_tokens == 12, "13 positions of the first turn are in the cache: three full pages"
    rig.check_outputs([first, second])


def test_requests_wait_for_a_prefix_that_a_neighbour_is_computing():
    """200 questions behind one preamble, all at once: the preamble is computed once."""
    rig = Rig(
        num_pages=400, page_size=4, max_num_seqs=16, max_num_batched_tokens=32, max_model_len=128, ahead=1
    )
    seqs = []
    for i in range(200):
        seqs += rig.add(str(i), [*prompt_of(90), 1 + i % 7, i % 41, 1 + i % 11], max_tokens=4)
    stranger = rig.add("stranger", prompt_of(5, 30), max_tokens=4)
    rig.run()
    rig.check_outputs(seqs + stranger)
    stats = rig.scheduler.stats()
    assert 1 - stats.num_cached_tokens / stats.num_prompt_tokens <= 0.15


@pytest.mark.parametrize("at_once", [True, False])
def test_questions_behind_a_shared_preamble_compute_little_of_what_is_offered(at_once):
    """200 questions of 30 to 90 tokens behind 900 shared ones: at most 0.15 of the prompt tokens, any way offered."""
    draw, offered, seqs = random.Random(0), 0, []
    rig = Rig(
        num_pages=2000, page_size=16, max_num_seqs=32, max_num_batched_tokens=256, max_model_len=1024, ahead=1
    )
    for i in range(200):
        question = [draw.randrange(1, VOCAB) for _ in range(draw.randint(30, 90))]
        seqs += rig.add(str(i), prompt_of(900) + question, max_tokens=3, ignore_eos=True)
        offered += 900 + len(question)
        if not at_once:
            rig.run()
    rig.run()
    rig.check_outputs(seqs)
    stats = rig.scheduler.stats()
    computed = rig.device.num_computed - 2 * len(seqs)  # but for the outputs: the last token is no input
    assert (
        stats.num_prompt_tokens == offered and stats.num_prompt_tokens - stats.num_cached_tokens == computed
    )
    assert computed <= 0.15 * offered


def test_a_stranger_overtakes_those_who_wait_for_a_prefix():
    rig = Rig(max_num_batched_tokens=8, max_num_partial_prefills=2)
    rig.add("leader", prompt_of(40), max_tokens=1)
    rig.add("follower", prompt_of(40), max_tokens=1)
    rig.add("stranger", prompt_of(3, 30), max_tokens=1)
    assert {request_id for request_id, *_ in shapes(rig.step())} == {"leader", "stranger"}
    rig.run()


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_those_who_wait_for_a_prefix_go_on_when_its_owner_leaves(end):
    rig = Rig(max_num_batched_tokens=8)
    (leader,) = rig.add("leader", prompt_of(40), max_tokens=1)
    followers = rig.add("f", prompt_of(40), max_tokens=3) + rig.add("g", prompt_of(39), n=3, max_tokens=3)
    rig.step()
    assert rig.scheduler.stats().num_waiting == 4
    if end == "abort":
        assert rig.scheduler.abort("leader") == [leader]
    else:
        rig.scheduler.finish(leader, "stop", "x", 0)
    rig.run()
    rig.check_outputs(followers)


def test_prompt_logprobs_skip_nothing():
    """C05: every position must be computed for the sample that reports them, also on a hit."""
    rig = Rig()
    rig.add("a", prompt_of(20), max_tokens=1)
    rig.run()
    seqs = rig.add("b", prompt_of(20), n=2, max_tokens=3, prompt_logprobs=1)
    rig.run()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 19]
    rig.check_outputs(seqs)


def test_cache_salt_separates_requests():
    rig = Rig()
    rig.add("a", prompt_of(20), max_tokens=1)
    rig.run()
    params = SamplingParams(max_tokens=1)
    (seq,) = rig.scheduler.add(Request("b", tuple(prompt_of(20)), params, cache_salt="adapter"))
    rig.run()
    assert seq.num_cached_tokens == 0


def test_reset_prefix_cache_needs_an_idle_engine():
    rig = Rig()
    rig.add("a", prompt_of(20), max_tokens=3, ignore_eos=True)
    rig.step()
    with pytest.raises(RuntimeError, match="1 sequences are running"):
        rig.scheduler.reset_prefix_cache()
    rig.run()
    rig.scheduler.reset_prefix_cache()
    (seq,) = rig.add("b", prompt_of(20), max_tokens=3)
    rig.run()
    assert seq.num_cached_tokens == 0


# Ends from outside


def test_stop_string_truncates_also_after_the_sequence_ended():
    rig = Rig()
    a, b = rig.add("a", [1, 2], max_tokens=9, ignore_eos=True) + rig.add(
        "b", [3], max_tokens=2, ignore_eos=True
    )
    rig.step()
    rig.step()
    rig.scheduler.finish(a, "stop", "END", num_output_tokens=1)
    assert b.finish_reason == "length"
    rig.scheduler.finish(b, "stop", "END", num_output_tokens=1)
    for seq in (a, b):
        assert (seq.num_output_tokens, seq.finish_reason, seq.stop_reason) == (1, "stop", "END")
    rig.check_idle()


def test_abort_ends_all_samples_wherever_they_are_and_leaves_neighbours_alone():
    rig = Rig(max_num_seqs=2, ahead=1)
    seqs = rig.add("a", prompt_of(5), n=5, max_tokens=20, ignore_eos=True)
    neighbour = rig.add("b", prompt_of(5, 9), max_tokens=5, ignore_eos=True)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.abort("a") == seqs
    assert rig.scheduler.abort("a") == [] and rig.scheduler.abort("never seen") == []
    rig.run()
    assert {seq.finish_reason for seq in seqs} == {"abort"}
    rig.check_outputs(neighbour)


def test_config_refuses_what_cannot_run():
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 must be at least max_num_seqs=8"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4, max_model_len=16)
    with pytest.raises(ValueError, match="decode_steps=0"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8, max_model_len=16, decode_steps=0)


# Everything together


@st.composite
def rigs(draw) -> Rig:
    max_num_seqs = draw(st.integers(1, 5))
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    budget = max_num_seqs + draw(st.sampled_from([0, 1, 5, 40]))
    decode_steps = draw(st.sampled_from([1, 3, 8]))
    windows = draw(st.sampled_from([(), (), (3,), (9,), (1, 20)]))
    # room for a longest sequence in every group with a window, and for few more
    most = max((most_pages(40, page_size, w, max(budget, decode_steps)) for w in windows), default=0)
    return Rig(
        num_pages=1 + draw(st.integers(max(2, 32 // page_size), 90 // page_size)),
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=40,
        max_num_partial_prefills=draw(st.integers(1, 3)),
        decode_steps=decode_steps,
        enable_prefix_caching=draw(st.booleans()),
        vocab=draw(st.sampled_from([2, 9, 50])),
        masks_stops=draw(st.booleans()),
        ahead=draw(st.integers(0, 1)),
        windows=(None, *windows),
        window_pages=1 + most * draw(st.integers(1, 3)),
    )


@st.composite
def requests(draw, name: str) -> Request:
    # One of two long texts and a tail, so that prefixes are shared often.
    text = prompt_of(30, draw(st.sampled_from([1, 2])))
    prompt = text[: draw(st.integers(0, 25))] + draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    max_tokens = draw(st.sampled_from([None, 0, 1, 2, 9]))
    params = SamplingParams(
        n=draw(st.sampled_from([1, 1, 2, 5])),
        max_tokens=max_tokens,
        min_tokens=0 if not max_tokens else draw(st.integers(0, 2)) % (max_tokens + 1),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([[], [1]])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )
    return Request(name, tuple(prompt), params, frozenset([0]), priority=draw(st.integers(-1, 1)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_simulation_every_request_ends_with_exactly_its_tokens(data):
    """Random traffic, pools, ends and aborts; the fake device notices any wrong page, position or copy."""
    rig = data.draw(rigs())
    coming = [data.draw(requests(str(i))) for i in range(data.draw(st.integers(1, 7)))]
    doomed = data.draw(st.sets(st.integers(0, 6), max_size=2))
    seqs: list[Sequence] = []
    aborted: set[Sequence] = set()
    for number, request in enumerate(coming):
        try:
            seqs += rig.scheduler.add(request)
        except RequestTooLong:
            continue
        for _ in range(data.draw(st.integers(0, 6))):
            rig.step()
            rig.groups.check_invariants()
        if number in doomed:
            aborted.update(rig.scheduler.abort(request.request_id))
            rig.groups.check_invariants()
    rig.run()
    assert all(step.num_tokens <= rig.max_num_batched_tokens for step in rig.steps)
    for step in rig.steps:
        one_token = [row.num_tokens == 1 for row in step.rows]
        assert one_token == sorted(one_token, reverse=True)
    rig.check_outputs([seq for seq in seqs if seq not in aborted])
    assert all(seq.finish_reason == "abort" for seq in aborted)


def test_pages_behind_a_window_serve_others_while_the_sequence_runs():
    """A prompt of 400 tokens in a pool of 8 pages of 4: 16 tokens of a window and 9 of a chunk at a time."""
    rig = Rig(
        num_pages=250, page_size=4, max_num_seqs=2, max_num_batched_tokens=9, max_model_len=500, decode_steps=4,
        windows=(None, 16), window_pages=1 + 2 * 7,
    )  # fmt: skip
    assert most_pages(500, 4, 16, 9) == 7
    seqs = [*rig.add("a", prompt_of(400), max_tokens=20), *rig.add("b", prompt_of(90, 2), max_tokens=60)]
    most = 0
    while rig.scheduler.has_unfinished:
        rig.step()
        rig.groups.check_invariants()
        most = max(most, rig.groups.groups[1].num_used)
    assert 7 < most <= 14, "both run at the same time"
    rig.check_outputs(seqs)
    assert rig.scheduler.stats().num_preemptions == 0


def test_a_sequence_waits_for_room_in_a_group_with_a_window():
    rig = Rig(
        num_pages=250, page_size=4, max_num_seqs=3, max_num_batched_tokens=9, max_model_len=500,
        windows=(None, 16), window_pages=1 + 7,
    )  # fmt: skip
    seqs = [seq for i in range(3) for seq in rig.add(str(i), prompt_of(60, i + 1), max_tokens=9)]
    rig.step()
    assert rig.scheduler.stats().num_running == 1
    rig.run()
    rig.check_outputs(seqs)


def test_a_pool_of_a_window_too_small_for_it_bounds_requests():
    """5 pages where a long sequence holds 7: 20 tokens in pages, and a last one that is no input."""
    rig = Rig(
        num_pages=250, page_size=4, max_num_seqs=1, max_num_batched_tokens=9, max_model_len=500,
        windows=(None, 16), window_pages=1 + 5,
    )  # fmt: skip
    with pytest.raises(RequestTooLong, match="a pool of 20 tokens"):
        rig.add("long", prompt_of(10), max_tokens=12)
    seqs = rig.add("fits", prompt_of(10), max_tokens=11)
    rig.run()
    rig.check_outputs(seqs)


def test_a_cached_prefix_needs_the_newest_pages_of_a_group_with_a_window():
    """As long as they are there; older ones of that group may be gone."""
    rig = Rig(
        num_pages=250, page_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=500,
        windows=(None, 8), window_pages=1 + 9,
    )  # fmt: skip
    prompt = prompt_of(80)
    rig.add("a", prompt, max_tokens=1)
    rig.run()
    (again,) = rig.add("again", [*prompt, 7], max_tokens=1)
    rig.run()
    assert again.num_cached_tokens == 80, "the older pages of the window were reclaimed, and nobody sees them"
    rig.add("other", prompt_of(80, 2), max_tokens=1)  # takes the pool of the window
    rig.run()
    (late,) = rig.add("late", [*prompt, 7], max_tokens=1)
    rig.run()
    assert late.num_cached_tokens == 0
    rig.check_outputs([again, late])


@pytest.mark.parametrize("same_prompt", [True, False])
def test_cost_of_a_step_does_not_grow_with_the_queue(same_prompt):
    def seconds_per_step(num_waiting: int) -> float:
        rig = Rig(num_pages=400, max_num_seqs=16, max_num_batched_tokens=32)
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        for i in range(num_waiting):
            prompt = prompt_of(20) if same_prompt else [1 + i % 40, 1 + i // 40 % 40, 1 + i // 1600]
            rig.scheduler.add(Request(str(i), tuple(prompt), params))
        times = []
        for _ in range(30):
            start = time.perf_counter()
            step = rig.dispatch()
            times.append(time.perf_counter() - start)
            rig.scheduler.commit(step, [[5]] * len(step.rows))
        return sorted(times)[15]

    assert seconds_per_step(10_000) < 5 * seconds_per_step(100), "100 times the queue"
