"""Queueing, without a device: the engine's own scheduler and page allocator, driven by a clock that the roofline
advances. A step takes as long as the roofline says for its bucket, divided by an efficiency."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxinfer.metrics import Work
from jaxinfer.page_allocator import PageAllocator
from jaxinfer.page_groups import PageGroups
from jaxinfer.programs.buckets import Buckets
from jaxinfer.request import Request, Sequence
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.scheduler import ScheduledStep, Scheduler, SchedulerConfig
from jaxinfer.tools.planner.plan import Plan
from jaxinfer.tools.planner.roofline import Setting, interconnect_time, step_cost
from jaxinfer.tools.planner.workload import Arrival

# Share of the roofline that programs reach. An estimate: published runs of engines like this one lie at 51 to
# 66 % of it. `jaxinfer plan --measure` says what it is on the machine at hand.
EFFICIENCY = 0.6
MAX_SAMPLES = 2000  # points of the curves over time


class StepTime:
    """Seconds of a step, in closed form: the roofline's sums are linear in tokens, pairs and residents."""

    def __init__(self, setting: Setting, efficiency: float, overhead_s: float = 0.0) -> None:
        if not 0 < efficiency <= 1:
            raise ValueError(f"efficiency={efficiency} must be in (0, 1]")
        hardware, per_second = setting.hardware, efficiency * setting.num_devices
        self._flops_rate = per_second * hardware.peak(setting.shape.dtype)
        self._byte_rate = per_second * hardware.memory_bandwidth
        self._cost = step_cost(setting.shape, setting.kv_dtype, setting.quantize, setting.kv_copies)
        self._interconnect = interconnect_time(setting, 1) / efficiency
        self._overhead = overhead_s

    def __call__(self, num_tokens: int, num_rows: int, pairs: int, resident: int) -> float:
        """Of a step of so many tokens and rows (padding included) whose tokens attend to `pairs` positions in all,
        and whose rows have `resident` tokens in their pages."""
        work = Work(1, num_tokens, num_rows, pairs, resident)
        compute, memory = self._cost.flops(work) / self._flops_rate, self._cost.bytes(work) / self._byte_rate
        return max(compute, memory) + num_tokens * self._interconnect + self._overhead


@dataclass
class Times:
    """Of one request, in seconds of the simulated clock."""

    arrival: float
    num_tokens: int = 0
    scheduled: float | None = None
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot_s(self) -> float | None:
        if self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.last_token - self.arrival


@dataclass
class Simulation:
    """What came out. `curve`: (time, pages used, rows running, requests waiting) now and then."""

    times: list[Times]
    duration_s: float
    num_steps: int  # programs run
    num_preemptions: int
    num_pages: int
    peak_pages: int
    busy_s: float  # the device was at work
    curve: list[tuple[float, int, int, int]] = field(repr=False)

    @property
    def output_tokens_per_second(self) -> float:
        return sum(times.num_tokens for times in self.times) / self.duration_s

    def percentiles(self) -> dict[str, dict[str, float | None]]:
        """p50, p90 and p99 of ttft_s, tpot_s, e2e_s and queue_s; None if no request has one."""
        values = {
            "ttft_s": [times.ttft_s for times in self.times],
            "tpot_s": [tpot for times in self.times if (tpot := times.tpot_s) is not None],
            "e2e_s": [times.e2e_s for times in self.times],
            "queue_s": [
                times.scheduled - times.arrival for times in self.times if times.scheduled is not None
            ],
        }
        return {name: {f"p{p}": percentile(found, p) for p in (50, 90, 99)} for name, found in values.items()}


def percentile(values: list[float], p: int) -> float | None:
    """Nearest rank; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * p // 100) - 1)]


def pages_that_fit(plan: Plan) -> int:
    """Pages of a pool that takes what is left beside everything else, at most what all rows can use.

    Raises:
      ValueError: not two pages are left.
    """
    memory, load = plan.memory, plan.load
    page_bytes = memory.kv_bytes_per_token * load.page_size
    pages = min((memory.left_bytes + memory.pool_bytes) // page_bytes, memory.num_pages)
    if pages < 2:
        raise ValueError(
            f"beside weights and temporaries {max(0, memory.left_bytes + memory.pool_bytes)} bytes are left for "
            f"pages of {page_bytes}; take more chips, fewer rows or a smaller model"
        )
    return pages


def simulate(
    arrivals: Iterable[Arrival],
    step_time: StepTime,
    config: SchedulerConfig,
    buckets: Buckets,
    *,
    num_pages: int,
    page_size: int,
) -> Simulation:
    """Runs requests through the scheduler and the allocator as the engine's loop does, one step ahead of the device.

    Prefixes are not shared: lengths say nothing about which prompts begin alike.

    Raises:
      RequestTooLong: a request can never fit.
    """
    allocator = PageGroups([PageAllocator(num_pages, page_size, enable_prefix_caching=False)])
    scheduler = Scheduler(config, allocator)
    coming = deque(arrivals)
    times: list[Times] = []
    unfinished: dict[Sequence, Times] = {}
    in_flight: deque[tuple[ScheduledStep, float]] = deque()  # with the time at which the device is done
    curve: list[tuple[float, int, int, int]] = []
    now = device_free = busy = 0.0
    num_steps = peak = 0
    stride = 1  # steps from one point of the curve to the next
    while coming or scheduler.has_unfinished:
        while coming and coming[0].time_s <= now:
            arrival = coming.popleft()
            params = SamplingParams(max_tokens=arrival.output_len, temperature=0.0, ignore_eos=True)
            (seq,) = scheduler.add(Request(str(len(times)), (0,) * arrival.prompt_len, params))
            unfinished[seq] = Times(arrival.time_s)
            times.append(unfinished[seq])
        step = scheduler.schedule()
        if step is not None:
            for seq in step.admitted:
                if unfinished[seq].scheduled is None:
                    unfinished[seq].scheduled = now
            duration = _duration(step, step_time, buckets)
            device_free = max(now, device_free) + duration
            busy += duration
            in_flight.append((step, device_free))
            num_steps += 1
            peak = max(peak, allocator.num_used)
            if num_steps % stride == 0:
                stats = scheduler.stats()
                curve.append((now, stats.pages_used, stats.num_running, stats.num_waiting))
        if len(in_flight) > (step is not None):
            done, finished_at = in_flight.popleft()
            now = max(now, finished_at)
            # What was drawn does not matter; accepted counts stop at each request's length.
            accepted = scheduler.commit(done, [(0,) * row.num_samples for row in done.rows])
            for row, count in zip(done.rows, accepted, strict=True):
                if count:
                    found = unfinished[row.seq]
                    found.first_token = found.first_token or now
                    found.last_token = now
                    found.num_tokens += count
                    if row.seq.finished:
                        del unfinished[row.seq]
        elif step is None:
            if coming[0].time_s > now:
                curve.append((now, 0, 0, 0))  # nothing to do until then
            now = max(now, coming[0].time_s)
        if len(curve) >= MAX_SAMPLES:
            del curve[1::2]
            stride *= 2
    return Simulation(
        times=times,
        duration_s=now,
        num_steps=num_steps,
        num_preemptions=scheduler.stats().num_preemptions,
        num_pages=num_pages,
        peak_pages=peak,
        busy_s=busy,
        curve=curve,
    )


def _duration(step: ScheduledStep, step_time: StepTime, buckets: Buckets) -> float:
    """Seconds of all iterations of a step, in the bucket that the engine would take."""
    _, num_tokens, num_rows = buckets.shape(step.num_tokens, len(step.rows), step.num_steps)
    pairs = resident = 0
    for row in step.rows:
        kv_len = row.start + row.num_tokens
        resident += kv_len
        pairs += row.num_tokens * row.start + row.num_tokens * (row.num_tokens + 1) // 2
    total = 0.0
    for _ in range(step.num_steps):
        total += step_time(num_tokens, num_rows, pairs, resident)
        pairs += len(step.rows)
        resident += len(step.rows)
    return total
