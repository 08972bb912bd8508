"""Results of benchmarks as text for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from jaxinfer.tools.bench.compare import Contiguous, NoCache
    from jaxinfer.tools.bench.run import Result

NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "queue_s": "queue"}


def print_result(console: Console, result: "Result") -> None:
    """Rates, latencies, steps, and how far that is from the limit."""
    rates, card, used = result.rates(), result.card, result.utilization
    console.print(
        _table(
            f"{len(result.outputs)} requests in {result.seconds:.2f} s",
            ("req/s", "tok/s in", "tok/s out", "tok/s total", "MFU", "MBU", "device busy"),
            [
                (
                    f"{rates['requests_per_s']:.2f}",
                    f"{rates['prompt_tok_per_s']:,.1f}",
                    f"{rates['output_tok_per_s']:,.1f}",
                    f"{rates['total_tok_per_s']:,.1f}",
                    _share(used.mfu),
                    _share(used.mbu),
                    f"at most {result.device_busy_share:.1%}",
                )
            ],
        )
    )
    console.print(
        _table(
            "latency, ms",
            ("", "mean", "p50", "p90", "p99"),
            [
                (NAMES[name], *(_ms(found[key]) for key in ("mean", "p50", "p90", "p99")))
                for name, found in sorted(
                    result.latency().items(), key=lambda item: list(NAMES).index(item[0])
                )
            ],
        )
    )
    console.print(
        _table(
            "steps, means",
            ("", "steps", "rows", "tokens", "padding", "host ms", "device ms"),
            [
                (
                    kind,
                    f"{totals.num_steps:,}",
                    f"{totals.num_rows / totals.num_steps:.1f}",
                    f"{totals.num_tokens / totals.num_steps:.1f}",
                    f"{totals.padding_share:.1%}",
                    _ms(totals.host_s / totals.num_steps),
                    _ms(totals.device_s / totals.num_steps),
                )
                for kind, totals in result.steps.items()
                if totals.num_steps
            ],
        )
    )
    limit = "" if card.limit_tok_per_s is None else f", {card.limit_tok_per_s:,.0f} tok/s at most"
    console.print(
        f"least: {card.num_prompt_tokens:,} prompt + {card.num_output_tokens:,} output tokens, "
        f"{card.flops / 1e9:,.1f} GFLOP, {card.bytes / 1e9:,.2f} GB{limit}",
        soft_wrap=True,
    )
    console.print(f"peaks: {used.peaks}", soft_wrap=True)


def print_no_cache(console: Console, found: "NoCache") -> None:
    """Milliseconds per token over position."""
    cached, recomputed = found.growth
    console.print(
        _table(
            f"ms per token of {found.rows} rows over output position: with the KV cache, and everything recomputed",
            ("position", "cached", "at least", "recomputed", "at least"),
            [
                (
                    f"{point.position:,}",
                    f"{point.cached_ms:,.2f}",
                    _number(point.cached_least_ms),
                    f"{point.recomputed_ms:,.2f}",
                    _number(point.recomputed_least_ms),
                )
                for point in found.points
            ],
        )
    )
    last = found.points[-1]
    console.print(
        f"last over first: cached {cached:.2f}, recomputed {recomputed:.2f}; at the end the cache saves "
        f"{1 - last.cached_ms / last.recomputed_ms:.1%}; {found.num_equal:,} of {found.output_tokens:,} tokens equal",
        soft_wrap=True,
    )


def print_contiguous(console: Console, found: "Contiguous") -> None:
    """Slots reserved, used and wasted, both ways."""
    console.print(
        _table(
            f"{found.pool_slots:,} slots, max_model_len={found.max_model_len:,}; means over time",
            ("", "rows allowed", "rows", "reserved", "used", "wasted", "s", "tok/s total"),
            [
                (
                    way.name,
                    f"{way.rows_allowed}",
                    f"{way.mean_rows:.1f}",
                    f"{way.reserved:,.0f}",
                    f"{way.used:,.0f}",
                    f"{way.wasted_share:.1%}",
                    f"{way.seconds:.2f}",
                    f"{way.total_tok_per_s:,.1f}",
                )
                for way in found.ways
            ],
        )
    )
    pages, reserved = found.ways
    console.print(
        f"pages: {pages.total_tok_per_s / reserved.total_tok_per_s:.2f}x the tokens per second; outputs of "
        f"{found.num_equal} of {found.num_requests} requests equal",
        soft_wrap=True,
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.2f}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.2f}"
