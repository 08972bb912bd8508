"""`LLM`: text in, text out. Tokens, chat templates and stop strings around the engine."""

import gc
import inspect
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxinfer.engine import Engine, EngineStats
from jaxinfer.metrics import Work
from jaxinfer.models.spec import ModelModule
from jaxinfer.options import defaults
from jaxinfer.options.device_facts import facts_of
from jaxinfer.options.llm_options import DEFAULTS, LLMOptions, documentation, signature
from jaxinfer.options.model_source import ModelSource, find_model, given_model
from jaxinfer.options.resolve import resolve
from jaxinfer.outputs import Loglikelihood, RequestOutput
from jaxinfer.programs import compile_cache, forks, saved_programs
from jaxinfer.programs.background import BackgroundCompiler, give_back_memory
from jaxinfer.programs.saved_programs import SavedPrograms
from jaxinfer.programs.settings import own_settings
from jaxinfer.request import Request, TopK, hash64
from jaxinfer.request_loop import Outputs, RequestLoop
from jaxinfer.sampling.logits_processors import ProcessorArgs
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text import chat
from jaxinfer.text import prompts as prompts_
from jaxinfer.text.prompts import Prompt
from jaxinfer.text.records import Record
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.text.wording import shown
from jaxinfer.tools.planner import EnginePlan, hardware
from jaxinfer.tools.planner.roofline import StepCost, step_cost
from jaxinfer.tools.planner.shape import ModelShape
from jaxinfer.tools.planner.utilization import Utilization, utilization
from jaxinfer.weights import weight_forms

logger = logging.getLogger(__name__)


# Attributes of vLLM's LLM that are named otherwise here, or not built -> what to do.
VLLM_METHODS = {
    "get_tokenizer": "use llm.tokenizer",
    "set_tokenizer": "give LLM(tokenizer=...)",
    "get_default_sampling_params": "use llm.default_sampling_params",
    "llm_engine": "use llm.engine",
    "model_config": "use llm.config",
    "get_metrics": "use llm.stats()",
    "start_profile": "use jax.profiler.start_trace, or `jaxinfer bench --profile`",
    "stop_profile": "use jax.profiler.stop_trace",
    "collective_rpc": "there are no workers: llm.engine runs in this process",
    "apply_model": "there are no workers: llm.module, llm.config and llm.engine.weights are the model",
    "sleep": "close() frees weights and pages; make the LLM again when it is needed",
    "wake_up": "close() frees weights and pages; make the LLM again when it is needed",
    "beam_search": "beams are not built yet; SamplingParams(n=...) draws several samples",
    "encode": "embeddings are not built yet",
    "embed": "embeddings are not built yet",
    "classify": "classification heads are not built yet",
    "reward": "reward heads are not built yet",
    "score": "pairs are not scored yet; loglikelihood() scores continuations of a prompt",
}


@dataclass(frozen=True)
class LLMStats(EngineStats):
    """Counts and times since the LLM was made; `utilization` is over the time in which the device was at work."""

    utilization: Utilization | None = None


class LLM:
    """A model ready to generate.

    Args:
      model: a catalog name, a Hugging Face directory, a .gguf file, or org/name of the Hugging Face hub. Or give
        `config` and `weights`.
      config, weights: a model config (such as `models.llama.Config`) and its weights tree.
      model_module: the model file of `config`; found by its module when left out.
      tokenizer: for `config` and `weights`; without it prompts are token ids and outputs have no text.
      options: fields of `options.LLMOptions`:
        {options}

    A sequence ends, in this order: at an end id of the model unless `ignore_eos` (finish_reason "stop", stop_reason
    None), at one of `stop_token_ids` ("stop", the id), at a stop string ("stop", the string), or at `max_tokens` or
    `max_model_len` ("length"). One that has no token to draw, or whose logits are not finite, ends with "error"
    anywhere. None but the last before `min_tokens` tokens: number min_tokens + 1 is the first
    that may end it. The end ids of a model (`end_token_ids`) are united from the tokenizer's EOS,
    `eos_token_id` of generation_config.json and config.json, and a GGUF file's eos, eot and eom ids.

    Methods may be called from several threads; one at a time runs the engine.

    Raises:
      ValueError, TypeError: an option is out of range or does not exist here; the message says what to do.
      FetchError, CheckpointError: the model cannot be found, fetched or read.
    """

    @own_settings()
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: Any = None,
        weights: Any = None,
        model_module: ModelModule | None = None,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> None:
        forks.check()
        if (model is None) == (config is None or weights is None):
            raise TypeError("give either model=..., or both config=... and weights=...")
        if model is not None and (config is not None or weights is not None or model_module is not None):
            raise TypeError("config, weights and model_module replace model=...; leave either out")
        if options.get("programs") is not None:
            saved_options = saved_programs.options(options["programs"])
            options = {k: v for k, v in saved_options.items() if model is not None or k != "dtype"} | options
        self.options = LLMOptions.from_keywords(options)
        defaults.check_matmul_precision(self.options.matmul_precision)
        device = jax.devices()[0]
        saved = _programs_and_cache(self.options, device)
        if model is None:
            for name in ("dtype", "revision", "token"):
                if (value := getattr(self.options, name)) != DEFAULTS[name]:
                    raise TypeError(
                        f"{name}={value!r} is for model=...; leave it out with config and weights"
                    )
            source = given_model(config, weights, model_module, tokenizer)
        else:
            source = find_model(model, self.options, tokenizer)
        self.resolved = resolve(self.options, source.facts, facts_of(device))
        for line in self.resolved.lines():
            logger.info(line)
        self.module, self.config = source.facts.module, self.resolved.config
        self.tokenizer, self.end_token_ids = source.tokenizer, source.end_token_ids
        self.default_sampling_params = source.sampling_defaults
        self.engine = self._start(source, saved)
        # Arrays on the device that nobody but this LLM has: `close` frees them.
        theirs = {id(leaf) for leaf in jax.tree.leaves(weights)}
        self._owned_weights = [
            leaf for leaf in jax.tree.leaves(self.engine.weights) if id(leaf) not in theirs
        ]
        self._ids = itertools.count()
        self._loop = RequestLoop(self.engine)
        self._said_defaults = self.default_sampling_params == SamplingParams()

    def _start(self, source: ModelSource, saved: SavedPrograms | None) -> Engine:
        """Reads the weights, and makes the engine that runs on them."""
        resolved = self.resolved

        def read() -> Any:
            return weight_forms.read(
                source.facts, resolved.config, resolved.form, partial(source.read_weights, resolved.config)
            )

        args = ProcessorArgs(self.options.logits_processor_args).signature
        # On a CPU what a first prompt needs is compiled, or loaded, while weights are read: the first program is traced
        # before and the second after, since tracing and reading both want the interpreter. Elsewhere
        # pages come last: leaves that are quantized as they come need room on the device for a while.
        early = resolved.device.platform == "cpu" and not source.facts.weights_given
        early = early and self.options.background_compile
        weights = None if early else read()
        programs = resolved.compiler(saved, weights=weights)
        programs.check_saved(resolved.buckets.programs(args))
        background = BackgroundCompiler(programs) if self.options.background_compile else None
        if early:
            assert background is not None
            first, *then = resolved.buckets.first_programs(args)
            programs.trace(first)
            background.add([first])
            try:
                weights = read()
            except BaseException:
                background.close()
                raise
            background.add(then)
        form = "" if self.options.quantize is None else f", {self.options.quantize}"
        return Engine(
            programs,
            weights,
            resolved.engine_config(cache_salt=source.name + form),
            bad_word_ids=None if source.tokenizer is None else self._bad_word_ids,
            background=background,
        )

    # What it is

    @property
    def plan(self) -> EnginePlan:
        """What it allocates on the device."""
        assert self.resolved.plan is not None  # else it would have been refused
        return self.resolved.plan

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens of one sequence together."""
        return self.resolved.max_model_len

    @property
    def device_choice(self) -> str:
        """The device, for people."""
        return f"{self.resolved.device.platform} ({self.resolved.device.device_kind})"

    def __getattr__(self, name: str) -> Any:
        """Says what to use instead of a method of vLLM's LLM that has another name here, or is not there."""
        advice = VLLM_METHODS.get(name)
        raise AttributeError(f"LLM has no attribute {name!r}" + (f": {advice}" if advice else ""))

    # Generation

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Seq[int] | None = None,
    ) -> list[RequestOutput]:
        """Completions of one prompt or a list of prompts, in the order asked.

        Args:
          prompts: a string, token ids (a list or an array), {"prompt": text} or {"prompt_token_ids": ids}; or any
            iterable of them, or an array with a row for each.
          sampling_params: for all prompts, or one for each; None takes `default_sampling_params`.
          use_tqdm: a progress bar, if the output is a terminal.
          priority: per prompt; lower runs first.

        Raises:
          ValueError: the prompt cannot run, or ends with an error: no token is left to draw, or the logits are
            not finite. In a list of prompts a bad one fails alone: its output has `error`, and no `outputs`, or
            those that ended with finish_reason "error" as far as they came.
        """
        many, single = prompts_.one_or_many(prompts)
        return self._finish(self._submit(many, sampling_params, priority), use_tqdm, single)

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        priority: Seq[int] | None = None,
    ) -> Outputs:
        """Like `generate`, as it happens: an output whenever one has grown, with all of its text so far.

        The last output of each request has `finished=True`, and `error` if it failed on the way.
        What is left is aborted when the stream is closed or
        dropped, read or not.
        """
        many, single = prompts_.one_or_many(prompts)
        records = self._submit(many, sampling_params, priority)
        _raise_single(records, single)
        return Outputs(self._loop, records)

    def chat(
        self,
        messages: Seq[Mapping[str, Any]] | Seq[Seq[Mapping[str, Any]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or a list of them; see `chat.render` for `template_options`.

        Raises:
          ChatTemplateError: the template refuses a conversation (in a list it fails alone).
        """
        single = prompts_.is_single_chat(messages)
        records = self._submit_chat(messages, sampling_params, template_options)
        return self._finish(records, use_tqdm, single)

    def stream_chat(
        self,
        messages: Seq[Mapping[str, Any]] | Seq[Seq[Mapping[str, Any]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        **template_options: Any,
    ) -> Outputs:
        """Like `chat`, as it happens; see `stream`."""
        single = prompts_.is_single_chat(messages)
        records = self._submit_chat(messages, sampling_params, template_options)
        _raise_single(records, single)
        return Outputs(self._loop, records)

    async def astream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        priority: Seq[int] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for `async for`: steps run in a thread, and the event loop is free meanwhile.

        Several may run at a time, and share steps. Cancelling one, or closing it, aborts what is left of it.
        """
        many, single = prompts_.one_or_many(prompts)
        async for output in self._loop.stream(lambda: self._submit(many, sampling_params, priority), single):
            yield output

    async def astream_chat(
        self,
        messages: Seq[Mapping[str, Any]] | Seq[Seq[Mapping[str, Any]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        **template_options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """`stream_chat` for `async for`; see `astream`."""
        single = prompts_.is_single_chat(messages)
        async for output in self._loop.stream(
            lambda: self._submit_chat(messages, sampling_params, template_options), single
        ):
            yield output

    def loglikelihood(
        self,
        prompts: str | Seq[int] | Seq[str] | Seq[Seq[int]],
        continuations: Seq[str | Seq[int]],
        *,
        use_tqdm: bool = True,
    ) -> list[Loglikelihood]:
        """How probable each continuation is after its prompt; what prompts share is computed once.

        Args:
          prompts: one for each continuation, or one for all. Text, or token ids; see `prompts.encode_pair` for
            how text is cut.
          continuations: of any number of tokens.

        Raises:
          ValueError: a pair cannot be scored; it is named, and nothing is computed.
          RuntimeError: the logits of a pair are not finite, or a step failed that another thread ran.
        """
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, detokenize=False)
        pairs = prompts_.encode_pairs(self.tokenizer, prompts, continuations, self.max_model_len)
        records: list[Record] = []
        # Equal beginnings next to each other: their pages are still there.
        order = sorted(range(len(pairs)), key=lambda i: pairs[i])
        try:
            with self._loop.lock:
                for i in order:
                    before, after = pairs[i]
                    records.append(
                        self._add((before + after), params, 0, lambda ids, _: (None, ids), len(before))
                    )
                    if records[-1].error is not None:
                        raise ValueError(f"pair {i}: {records[-1].error}")
            self._run(records, "score", use_tqdm)
        finally:
            self._loop.leave(records)
        for i, record in zip(order, records, strict=True):
            if record.error is not None:
                raise RuntimeError(f"pair {i}: {record.error}")
        results = {i: record.loglikelihood() for i, record in zip(order, records, strict=True)}
        return [results[i] for i in range(len(pairs))]

    def abort(self, request_id: str) -> None:
        """Ends a request with finish_reason "abort"; nothing happens if it has ended."""
        self._loop.abort(request_id)

    def _submit_chat(self, messages, sampling_params, template_options, arrays=None) -> list[Record]:
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer, and this LLM has none; give LLM(tokenizer=...)")
        tokenizer, options = self.tokenizer, chat.known_options(template_options)
        conversations = [messages] if prompts_.is_single_chat(messages) else list(messages)

        def render(conversation, max_tokens):
            ids = chat.render(tokenizer, conversation, max_tokens=max_tokens, **options)
            return tokenizer.decode(ids, skip_special_tokens=False), ids

        return self._submit_all(conversations, render, sampling_params, None, arrays)

    def _submit(self, prompts, sampling_params, priority, arrays=None) -> list[Record]:
        tokenize = partial(prompts_.tokenize, self.tokenizer)
        return self._submit_all(prompts, tokenize, sampling_params, priority, arrays)

    def _submit_all(self, prompts, tokenize, sampling_params, priority, arrays) -> list[Record]:
        if sampling_params is None and not self._said_defaults:
            self._said_defaults = True
            logger.warning(
                "requests without SamplingParams take the defaults of the model's generation_config.json: %s; "
                "LLM(generation_config='none') ignores them",
                self.default_sampling_params,
            )
        given = self.default_sampling_params if sampling_params is None else sampling_params
        params = prompts_.one_each("sampling_params", given, len(prompts))
        for i, each in enumerate(params):
            if not isinstance(each, SamplingParams):
                raise TypeError(f"sampling_params of prompt {i} is {shown(each)}; give SamplingParams")
        priorities = prompts_.one_each("priority", 0 if priority is None else list(priority), len(prompts))
        records: list[Record] = []
        try:
            with self._loop.lock:
                for each in zip(prompts, params, priorities, strict=True):
                    records.append(self._add(*each, tokenize, arrays=arrays))
        except BaseException:  # Ctrl-C too: nobody will read those that are queued
            self._loop.leave(records)
            raise
        return records

    def _add(
        self,
        prompt: Any,
        params: SamplingParams,
        priority: int,
        tokenize: Any,
        score_from: int = 1,
        arrays: TopK | None = None,
    ) -> Record:
        """Queues one prompt. What is wrong with it is kept in the record's `error`."""
        number = next(self._ids)
        record = Record(prompt if isinstance(prompt, str) else None, request_id=str(number))
        if params.detokenize:
            record.tokenizer = self.tokenizer
        try:
            if params.stop and self.tokenizer is None:
                raise ValueError(f"stop={shown(params.stop)} needs a tokenizer, and this LLM has none")
            longest = self.max_model_len if params.truncate_prompt_tokens is None else None
            record.prompt, record.prompt_token_ids = tokenize(prompt, longest)
            if params.truncate_prompt_tokens is not None:
                keep = params.truncate_prompt_tokens
                if keep < 0:  # as many as leave room for the output
                    output = 1 if params.max_tokens is None else params.max_tokens
                    keep = max(1, self.max_model_len - output)
                record.prompt_token_ids = record.prompt_token_ids[-keep:]
            request = Request(
                request_id=record.request_id,
                prompt_token_ids=tuple(record.prompt_token_ids),
                params=params,
                end_token_ids=self.end_token_ids,
                arrival_time=self.engine.clock(),
                priority=priority,
                seed=hash64(self.options.seed, number) if params.seed is None else params.seed,
                prompt=record.prompt,
                score_from=score_from,
                arrays=arrays,
            )
            self._loop.add(record, request)
        except (ValueError, TypeError, NotImplementedError) as error:
            record.error = str(error)
        return record

    def _finish(self, records: list[Record], use_tqdm: bool, single: bool) -> list[RequestOutput]:
        _raise_single(records, single)
        try:
            self._run(records, "generate", use_tqdm)
        finally:
            self._loop.leave(records)
        _raise_single(records, single)
        return [record.output() for record in records]

    def _run(self, records: list[Record], name: str, use_tqdm: bool) -> None:
        """Steps until all are finished, with a progress bar."""
        # disable=None: no bar unless the output is a terminal
        disable = None if use_tqdm else True
        with tqdm(total=len(records), desc=name, unit="req", disable=disable) as bar:
            bar.update(sum(record.error is not None for record in records))
            self._loop.run(records, bar.update)

    def _bad_word_ids(self, word: str) -> list[list[int]]:
        """A bad word at the start of a text and after a space: its token ids in both places."""
        assert self.tokenizer is not None
        forms = [self.tokenizer.encode_plain(text) for text in (word, " " + word.lstrip())]
        return [ids for i, ids in enumerate(forms) if ids and ids not in forms[:i]]

    # Care

    def warmup(self, *, use_tqdm: bool = True) -> None:
        """Compiles all programs of the buckets; after it nothing compiles."""
        self._loop.check_open()
        programs = self.engine.config.buckets.programs()
        with tqdm(total=len(programs), desc="compile", disable=None if use_tqdm else True) as bar:
            self.engine.warmup(progress=lambda program: bar.update())

    def stats(self) -> LLMStats:
        """All counts and times so far, and how far that is from the limit of the device while it was at work."""
        stats = self.engine.stats()
        seconds = sum(totals.device_s for totals in stats.steps.values())
        return LLMStats(**vars(stats), utilization=self.utilization(stats.work, seconds))

    def utilization(self, work: Work, seconds: float) -> Utilization:
        """MFU and MBU of the device if it did `work` in `seconds`."""
        device = jax.devices()[0]
        return utilization(self.step_cost, work, seconds, hardware.known(device), self.config.dtype)

    @cached_property
    def step_cost(self) -> StepCost:
        """FLOPs and bytes that steps of this model need at the least, with the weights in the form they have."""
        shape = ModelShape.from_config(self.module, self.config)
        leaves = jax.tree.leaves(self.engine.weights)
        unread = [] if shape.tied else jax.tree.leaves(self.engine.weights.embed)  # but for a few rows
        read = sum(leaf.nbytes for leaf in leaves) - sum(leaf.nbytes for leaf in unread)
        return step_cost(shape, self.engine.spec.dtype, bytes_per_forward=read)

    @own_settings()
    def update_weights(self, weights: Any) -> None:
        """Goes on with other weights of the same shapes and dtypes; see `Engine.update_weights`."""
        with self._loop.lock:
            self._loop.check_open()
            resolved = self.resolved
            in_form = weight_forms.in_form(resolved.model, resolved.config, resolved.form, weights)
            self.engine.update_weights(in_form)
            ours = {id(leaf) for leaf in self._owned_weights}
            arrays = [leaf for leaf in jax.tree.leaves(weights) if isinstance(leaf, jax.Array)]
            theirs = {id(leaf) for leaf in arrays} - ours
            pairs = zip(jax.tree.leaves(in_form), jax.tree.leaves(self.engine.weights), strict=True)
            self._owned_weights = [running for leaf, running in pairs if id(leaf) not in theirs]

    def close(self) -> None:
        """Frees device memory and programs. What is unfinished ends with an error; the LLM cannot be used after it."""
        with self._loop.lock:
            if self._loop.close():
                self.engine.close(weights=False)
                for leaf in self._owned_weights:
                    if not leaf.is_deleted():
                        leaf.delete()
                gc.collect()  # only then jax lets go of the numpy arrays that weights came in
                give_back_memory()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


LLM.__doc__ = inspect.cleandoc(LLM.__doc__ or "").replace("    {options}", documentation("    "))
LLM.__init__.__signature__ = signature(LLM.__init__)  # type: ignore[attr-defined]


def _programs_and_cache(options: LLMOptions, device: jax.Device) -> SavedPrograms | None:
    """Opens the saved programs of `options`, and sets the persistent cache up."""
    saved = None if options.programs is None else SavedPrograms(options.programs, device)
    folder = options.compilation_cache_dir
    if saved is not None and saved.cache is not None:  # the form in which these programs are saved
        folder = saved.cache
    elif folder == "auto":
        folder = compile_cache.default_folder()
    compile_cache.enable(folder)
    return saved


def _raise_single(records: list[Record], single: bool) -> None:
    if single and records[0].error is not None:
        raise ValueError(records[0].error)
