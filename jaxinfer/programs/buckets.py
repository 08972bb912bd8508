"""The programs of an engine: what tells one from another, and the shapes that they are compiled for."""

from dataclasses import dataclass

from jaxinfer.sampling.logits_processors import Signature
from jaxinfer.sampling.sample import Variant
from jaxinfer.scheduler import SchedulerConfig

SCORE_POSITIONS = 64  # prompt positions that one score program unembeds
MAX_SHAPES = 8  # of the default buckets
SINGLE_PROMPT = 128  # tokens of a prompt that has a program of one row, on CPU


@dataclass(frozen=True)
class Program:
    """The static part of one compiled program. num_tokens == num_rows for decode."""

    kind: str  # "prefill" | "decode" | "score"
    num_tokens: int  # T
    num_rows: int  # B; positions at once of "score"
    num_steps: int = 1  # k
    variant: Variant = "greedy"  # of the sampler
    num_logprobs: int | None = None  # alternatives returned per token; None returns no logprobs
    extras_shape: tuple[int, int, int, int] | None = (
        None  # lengths of the lists in Extras, for variant "full"
    )
    num_labels: int = 0  # logprob_token_ids per row
    processor_args: Signature = ()  # what requests hand to logits processors
    tile: int | None = None  # tokens worked on together, for batch invariance (see tiles.py); None: all

    def __str__(self) -> str:
        shape = (self.num_rows, self.num_steps) if self.kind == "decode" else (self.num_tokens, self.num_rows)
        logprobs = "" if self.num_logprobs is None else f" logprobs={self.num_logprobs}"
        logprobs += f" labels={self.num_labels}" if self.num_labels else ""
        variant = "" if self.kind == "score" else f" {self.variant}"
        tile = "" if self.tile is None else f" tile={self.tile}"
        return f"{self.kind}[{shape[0]},{shape[1]}]{variant}{logprobs}{tile}"


@dataclass(frozen=True)
class Buckets:
    """The shapes that programs are compiled for; a step takes the smallest that holds it."""

    prefill: tuple[tuple[int, int], ...]  # (T, B), cheapest first
    decode: tuple[int, ...]  # B of the programs that take one step, ascending
    decode_steps: int  # k
    multi_step: tuple[int, ...]  # B of those that take k steps, ascending; unused if k is 1
    variants: tuple[Variant, ...] = ("greedy", "sample")  # compiled at warm-up
    prompt_logprobs: tuple[
        int, ...
    ] = ()  # their score programs, likewise: 0, or MAX_LOGPROBS for all up to it
    tile: int | None = None  # of the programs

    @staticmethod
    def default(
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_steps: int,
        platform: str,
        tile: int | None = None,
    ) -> "Buckets":
        """A lattice of at most 8 shapes, each for greedy and for sampled rows: at most 16 programs.

        With R = max_num_seqs and T = max_num_batched_tokens:
          CPU: decode 8, 3R/8, 5R/8 and R rows, and k steps at once for 1 row alone: it rarely takes one. A step's
            time grows with its rows, so row counts are close; the host costs little beside a step of many rows. One
            program serves greedy and sampled rows: a branch costs nothing, and a loaded program costs time and memory.
            A prompt of up to 128 tokens that comes alone has a program of one row: it is loaded in half the time of
            one with R rows, and unembeds one row.
          elsewhere: decode 8, 64 (256 if R is over 256) and R rows, each with k steps at once: rows are nearly
            free. A branch makes a device wait for the host, so greedy rows have their own programs.
          prefill T, T/4, T/16 ... tokens (at least 32) of up to R rows, as many as there is room for.
        So R = 64, T = 512, k = 8 has decode[8,1] [24,1] [40,1] [64,1] [1,8] and prefill[128,1] [128,64] [512,64] on
        CPU: 8 programs; elsewhere decode[8,1] [64,1] [8,8] [64,8] and prefill[32,32] [128,64] [512,64].
        With a tile: decode R, k steps for 1 row, prefill T. The work of a step is its live tiles, whatever its bucket.
        """
        most = max_num_seqs
        variants: tuple[Variant, ...] = ("any",) if platform == "cpu" else ("greedy", "sample")
        if tile is not None:
            widest = (max_num_batched_tokens, min(max_num_batched_tokens, most))
            return Buckets((widest,), (most,), decode_steps, multi_step=(1,), variants=variants, tile=tile)
        if platform == "cpu":
            rows = [1] * (decode_steps == 1) + [8, 3 * most // 8, 5 * most // 8]
        else:
            rows = [8, 64 if most <= 256 else 256]
        decode = tuple(sorted({b for b in rows if 0 < b < most} | {most}))
        multi_step = (1,) if platform == "cpu" else decode
        num_decode = len(decode) + (decode_steps > 1) * len(multi_step)
        single = platform == "cpu"  # one more prefill
        widths = [max_num_batched_tokens // 4**i for i in range(MAX_SHAPES - num_decode - single)]
        prefill = {(t, min(t, most)) for t in widths if t >= 32 or t == widths[0]}
        if single:
            prefill.add((min(SINGLE_PROMPT, max_num_batched_tokens), 1))
        return Buckets(
            prefill=tuple(sorted(prefill)),
            decode=decode,
            decode_steps=decode_steps,
            multi_step=multi_step,
            variants=variants,
        )

    @property
    def max_multi_step_rows(self) -> int:
        """Rows that may take k steps at once."""
        return max(self.multi_step, default=0)

    def check(self, scheduler: SchedulerConfig) -> None:
        """Raises ValueError, with the numbers, if a step of such a scheduler would find no bucket."""
        rows, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        if self.decode_steps != scheduler.decode_steps:
            raise ValueError(
                f"buckets have decode_steps={self.decode_steps}, the scheduler {scheduler.decode_steps}: "
                "they must be equal"
            )
        if not any(t >= tokens and b >= rows for t, b in self.prefill):
            raise ValueError(
                f"no prefill bucket of {self.prefill} holds max_num_batched_tokens={tokens} and "
                f"max_num_seqs={rows}: add ({tokens}, {rows})"
            )
        if max(self.decode, default=0) < rows:
            raise ValueError(f"no decode bucket of {self.decode} holds max_num_seqs={rows}: add {rows}")
        multi = min(rows, scheduler.max_multi_step_rows or rows)
        if self.decode_steps > 1 and multi > self.max_multi_step_rows:
            raise ValueError(
                f"{multi} rows may take decode_steps={self.decode_steps} steps at once, and no bucket of "
                f"multi_step={self.multi_step} holds them"
            )
        unknown = set(self.variants) - {"greedy", "sample", "any"}
        if unknown:
            raise ValueError(
                f"buckets have variants {sorted(unknown)}; warm-up compiles 'greedy', 'sample' or 'any'"
            )

    def programs(self, processor_args: Signature = ()) -> list[Program]:
        """All programs that warm-up compiles, the ones needed first at the front.

        processor_args: what logits processors get, which all but scores are compiled for.
        """
        shapes = [("prefill", t, b, 1) for t, b in self.prefill]
        shapes += [("decode", b, b, 1) for b in self.decode]
        if self.decode_steps > 1:
            shapes += [("decode", b, b, self.decode_steps) for b in self.multi_step]
        programs = [
            Program(kind, t, b, k, variant, processor_args=processor_args, tile=self.tile)
            for variant in self.variants
            for kind, t, b, k in shapes
        ]
        widths = dict.fromkeys(t for t, _ in self.prefill)
        return programs + [score_program(t, k, self.tile) for k in self.prompt_logprobs for t in widths]

    def variant(self, needed: Variant) -> Variant:
        """The variant whose programs run rows that need `needed`."""
        return "any" if needed != "full" and "any" in self.variants else needed

    def first_programs(self, processor_args: Signature = ()) -> list[Program]:
        """Those that one short prompt needs: its prefill, and then k steps at once, in the first variant."""
        k, variant = self.decode_steps, self.variants[0]
        shapes = ("prefill", *self.prefill[0], 1), (*self.shape(1, 1, k), k)
        return [Program(*s, variant, processor_args=processor_args, tile=self.tile) for s in shapes]

    def shape(
        self, num_tokens: int, num_rows: int, num_steps: int, scores_prompt: bool = False
    ) -> tuple[str, int, int]:
        """(kind, T, B) of the smallest bucket for a step; prompts are scored by prefills alone.

        Raises:
          ValueError: there is none.
        """
        if num_tokens == num_rows and not scores_prompt:
            for b in self.decode if num_steps == 1 else self.multi_step:
                if num_rows <= b:
                    return "decode", b, b
        else:
            for t, b in self.prefill:
                if num_tokens <= t and num_rows <= b:
                    return "prefill", t, b
        raise ValueError(f"no bucket holds {num_tokens} tokens of {num_rows} rows, {num_steps} steps: {self}")


def score_program(num_tokens: int, num_logprobs: int, tile: int | None = None) -> Program:
    """The program that scores prompt tokens after a prefill of `num_tokens`."""
    num_positions = min(num_tokens, SCORE_POSITIONS)
    return Program("score", num_tokens, num_positions, num_logprobs=num_logprobs, tile=tile)
