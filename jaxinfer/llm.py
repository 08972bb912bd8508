"""`LLM`: text in, text out. Tokens, chat templates and stop strings around the engine."""

import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import checkpoints
from checkpoints import fetch
from jaxinfer import chat, compile_cache, defaults, models
from jaxinfer.detokenizer import TextStream
from jaxinfer.engine import Engine, EngineConfig
from jaxinfer.kv_cache import KVCacheSpec
from jaxinfer.request import (
    CompletionOutput,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
)
from jaxinfer.sampling import LogprobsMode
from jaxinfer.scheduler import SchedulerConfig, SchedulerStats
from jaxinfer.step import Buckets
from jaxinfer.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Seq[int] | Mapping[str, Any]

# Options of vLLM that have another name here, or that cannot act.
RENAMED_OPTIONS = {
    "block_size": "use page_size",
    "num_gpu_blocks_override": "use num_pages",
    "kv_cache_dtype": "quantized pages are not built yet; pages have the dtype of the model",
    "tensor_parallel_size": "sharding is not built yet; leave it out",
    "pipeline_parallel_size": "sharding is not built yet; leave it out",
    "quantization": "weights are read in the form of the file; leave it out",
    "enforce_eager": "every step is a compiled program; leave it out",
    "swap_space": "a preempted sequence is computed again; leave it out",
    "cpu_offload_gb": "weights and pages stay on one device; leave it out",
    "disable_log_stats": "use stats()",
    "enable_chunked_prefill": "prefill is always chunked; max_num_batched_tokens bounds a chunk",
    "num_scheduler_steps": "use decode_steps",
    "trust_remote_code": "code that comes with a checkpoint is never run",
}


@dataclass(eq=False)
class _Record:
    """One request of a user, from its prompt to its finished output."""

    prompt: str | None
    prompt_token_ids: list[int] = field(default_factory=list)
    request_id: str = ""
    sequences: list[Sequence] = field(default_factory=list)
    streams: list[TextStream | None] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    changed: bool = False
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or all(seq.finish_reason is not None for seq in self.sequences)

    def output(self) -> RequestOutput:
        metrics = [seq.metrics for seq in self.sequences if seq.metrics is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.sequences[0].prompt_logprobs or None if self.sequences else None,
            outputs=[
                CompletionOutput(
                    index=seq.index,
                    text=text,
                    token_ids=seq.output_token_ids,
                    cumulative_logprob=None if seq.params.logprobs is None else seq.cumulative_logprob,
                    logprobs=list(seq.logprobs) if seq.params.wants_logprobs else None,
                    finish_reason=seq.finish_reason,
                    stop_reason=seq.stop_reason,
                )
                for seq, text in zip(self.sequences, self.texts, strict=True)
            ],
            finished=self.finished,
            # With n > 1 the times are those of the sample that ended last.
            metrics=max(metrics, key=lambda m: m.finished_time or 0.0) if metrics else None,
            num_cached_tokens=self.sequences[0].num_cached_tokens if self.sequences else 0,
            error=self.error,
        )


class LLM:
    """A model ready to generate.

    Args:
      model: a catalog name, a Hugging Face directory or a .gguf file. Or give `config` and `weights`.
      config, weights: a model config (such as `models.llama.Config`) and its weights tree.
      model_module: the model file of `config`; found by its module when left out.
      tokenizer: for `config` and `weights`; without it prompts are token ids and outputs have no text.
      dtype: of weights and activations: auto, float32, bfloat16, float16.
      max_model_len: prompt + output tokens of one sequence; default the model's own maximum.
      max_num_seqs: rows that run at the same time.
      max_num_batched_tokens: tokens of one step; bounds a prefill chunk.
      max_num_partial_prefills: prompts that may be under way in chunks at the same time.
      num_pages | kv_cache_memory_bytes | gpu_memory_utilization: size of the KV cache; at most one of them.
      page_size: tokens per page.
      seed: of requests that name none: the i-th request of this LLM draws from hash64(seed, i).
      enable_prefix_caching: share the pages of equal prompt beginnings.
      implementation: kernels that write and read pages: auto, reference, xla, tpu, gpu.
      matmul_precision: of products in float32: None makes float32 mean float32 on every device.
      decode_steps: tokens per row that one decode program may draw before the host looks.
      strict_compile: raise if a program is compiled after `warmup()`.
      logprobs_mode: "raw" (log-softmax of the model's logits) or "processed" (after all filters).
      compilation_cache_dir: folder of compiled programs, "auto", or None for no cache.

    Raises:
      ValueError, TypeError: an option is out of range or does not exist here; the message says what to do.
      FetchError, CheckpointError: the model cannot be found, fetched or read.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: Any = None,
        weights: Any = None,
        model_module: ModuleType | None = None,
        tokenizer: Tokenizer | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_num_partial_prefills: int = 1,
        num_pages: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        page_size: int | str = "auto",
        seed: int = 0,
        enable_prefix_caching: bool = True,
        implementation: str = "auto",
        matmul_precision: str | None = None,
        decode_steps: int = 8,
        strict_compile: bool = False,
        logprobs_mode: LogprobsMode = "raw",
        compilation_cache_dir: str | Path | None = "auto",
        buckets: Buckets | None = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(unknown)
        if (model is None) == (config is None or weights is None):
            raise TypeError("give either model=..., or both config=... and weights=...")
        compile_cache.enable(
            compile_cache.default_folder() if compilation_cache_dir == "auto" else compilation_cache_dir
        )
        device = jax.devices()[0]
        self._owns_weights = model is not None
        self.end_token_ids: frozenset[int] = frozenset()
        salt = "weights given as a tree"
        if model is not None:
            path = fetch.resolve(model)
            checkpoint = checkpoints.open_checkpoint(path)
            model_module = models.for_config(checkpoint.config)
            config = model_module.Config.from_hf(checkpoint.config, dtype=defaults.dtype(dtype, device))
            tokenizer = tokenizer or load_tokenizer(path)
            weights = checkpoints.load_weights(checkpoint, model_module, config, jnp.dtype(config.dtype))
            self.end_token_ids = frozenset(checkpoint.end_token_ids)
            salt = str(path)
        if tokenizer is not None:
            self.end_token_ids |= tokenizer.eos_token_ids
        self.tokenizer, self.config = tokenizer, config
        model_module = model_module or models.module_of(config)

        self.max_model_len = max_model_len or config.max_position_embeddings
        if self.max_model_len > config.max_position_embeddings:
            raise ValueError(
                f"max_model_len={self.max_model_len} is over the model's own maximum of "
                f"{config.max_position_embeddings} positions"
            )
        chosen = defaults.implementation(implementation, device)
        spec = KVCacheSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=defaults.page_size(page_size, device, self.max_model_len),
            num_pages=2,
            dtype=config.dtype,
            implementation=chosen.value,
        )
        weights_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        pages = defaults.num_pages(
            spec,
            device,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            weights_bytes=weights_bytes,
            num_pages=num_pages,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        spec = replace(spec, num_pages=pages.value)
        logger.info("attention: %s on %s, since %s", chosen.value, device.device_kind, chosen.reason)
        logger.info("KV cache: %s, from %s", spec.describe(), pages.reason)
        max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        buckets = buckets or Buckets.default(
            max_num_seqs, max_num_batched_tokens, decode_steps, device.platform
        )
        if matmul_precision is None and config.dtype == "float32":
            matmul_precision = "highest"
        self.engine = Engine(
            model_module,
            config,
            weights,
            spec,
            EngineConfig(
                scheduler=SchedulerConfig(
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_model_len=self.max_model_len,
                    max_num_partial_prefills=max_num_partial_prefills,
                    decode_steps=decode_steps,
                    max_multi_step_rows=buckets.max_multi_step_rows,
                ),
                buckets=buckets,
                logprobs_mode=logprobs_mode,
                matmul_precision=matmul_precision,
                strict_compile=strict_compile,
                enable_prefix_caching=enable_prefix_caching,
                cache_salt=salt,
            ),
            bad_word_ids=None if tokenizer is None else self._bad_word_ids,
        )
        self.device_choice = f"{device.platform} ({device.device_kind})"
        self.implementation_choice = chosen
        self._seed = seed
        self._ids = itertools.count()
        self._records: dict[Sequence, _Record] = {}

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
          prompts: a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a list.
          sampling_params: for all prompts, or one for each; None takes `SamplingParams()`.
          use_tqdm: a progress bar, if the output is a terminal.
          priority: per prompt; lower runs first.

        Raises:
          ValueError: the prompt cannot run. In a list of prompts a bad one fails alone: its output has
            `error` and no `outputs`.
        """
        return self._finish(self._submit(prompts, sampling_params, priority), use_tqdm, _is_single(prompts))

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        priority: Seq[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, as it happens: an output whenever one has grown, with all of its text so far.

        The last output of each request has `finished=True`. Leaving the loop early aborts what is left.
        """
        records = self._submit(prompts, sampling_params, priority)
        _raise_single(records, _is_single(prompts))
        return self._outputs(records)

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
        single = isinstance(messages[0], Mapping) if messages else True
        records = self._submit_chat(messages, sampling_params, template_options)
        return self._finish(records, use_tqdm, single)

    def stream_chat(
        self,
        messages: Seq[Mapping[str, Any]] | Seq[Seq[Mapping[str, Any]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        **template_options: Any,
    ) -> Iterator[RequestOutput]:
        """Like `chat`, as it happens; see `stream`."""
        single = isinstance(messages[0], Mapping) if messages else True
        records = self._submit_chat(messages, sampling_params, template_options)
        _raise_single(records, single)
        return self._outputs(records)

    def abort(self, request_id: str) -> None:
        """Ends a request with finish_reason "abort"; nothing happens if it has ended."""
        self.engine.abort(request_id)
        for record in set(self._records.values()):
            if record.request_id == request_id:
                record.changed = True

    def _submit_chat(self, messages, sampling_params, template_options) -> list[_Record]:
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer, and this LLM has none; give LLM(tokenizer=...)")
        tokenizer = self.tokenizer
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)

        def render(conversation):
            ids = chat.render(tokenizer, conversation, **template_options)
            return tokenizer.decode(ids, skip_special_tokens=False), ids

        return self._submit_all(conversations, render, sampling_params, None)

    def _submit(self, prompts, sampling_params, priority) -> list[_Record]:
        many = [prompts] if _is_single(prompts) else list(prompts)
        return self._submit_all(many, self._tokenize, sampling_params, priority)

    def _submit_all(self, prompts, tokenize, sampling_params, priority) -> list[_Record]:
        params = _one_each("sampling_params", sampling_params or SamplingParams(), len(prompts))
        priorities = _one_each("priority", 0 if priority is None else list(priority), len(prompts))
        return [self._add(*each, tokenize) for each in zip(prompts, params, priorities, strict=True)]

    def _add(self, prompt: Any, params: SamplingParams, priority: int, tokenize: Any) -> _Record:
        """Queues one prompt. What is wrong with it is kept in the record's `error`."""
        number = next(self._ids)
        record = _Record(prompt if isinstance(prompt, str) else None, request_id=str(number))
        try:
            record.prompt, record.prompt_token_ids = tokenize(prompt)
            if params.truncate_prompt_tokens is not None:
                keep = params.truncate_prompt_tokens
                record.prompt_token_ids = record.prompt_token_ids[
                    -(self.max_model_len if keep < 0 else keep) :
                ]
            request = Request(
                request_id=record.request_id,
                prompt_token_ids=tuple(record.prompt_token_ids),
                params=params,
                end_token_ids=self.end_token_ids,
                arrival_time=self.engine.clock(),
                priority=priority,
                seed=_hash64(self._seed, number) if params.seed is None else params.seed,
                prompt=record.prompt,
            )
            record.sequences = self.engine.add(request)
        except (ValueError, TypeError, NotImplementedError) as error:
            record.error = str(error)
            return record
        for seq in record.sequences:
            self._records[seq] = record
            record.texts.append("")
            stream = None
            if self.tokenizer is not None and params.detokenize:
                stream = TextStream(
                    self.tokenizer,
                    record.prompt_token_ids,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=tuple(params.stop or ()),
                    include_stop=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                )
            elif params.stop:
                self.engine.abort(record.request_id)
                record.error = f"stop={params.stop!r} needs a tokenizer, and this LLM has none"
            record.streams.append(stream)
        return record

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text if known, token ids) of one prompt."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise ValueError(
                    f"a prompt dict has prompt or prompt_token_ids; this one has {sorted(prompt) or 'nothing'}"
                )
            text = prompt.get("prompt")
            if "prompt_token_ids" in prompt:
                return text, _token_ids(prompt["prompt_token_ids"])
            prompt = text  # type: ignore[assignment]
        if not isinstance(prompt, str):
            return None, _token_ids(prompt)
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and this LLM has none; give token ids")
        ids = self.tokenizer.encode(prompt)
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise ValueError("the prompt is empty, and this model has no BOS token to begin from")
        return prompt, ids

    def _finish(self, records: list[_Record], use_tqdm: bool, single: bool) -> list[RequestOutput]:
        _raise_single(records, single)
        # disable=None: no bar unless the output is a terminal
        with tqdm(total=len(records), desc="generate", unit="req", disable=None if use_tqdm else True) as bar:
            bar.update(sum(record.error is not None for record in records))
            for _ in self._advance(records, bar):
                pass
        return [record.output() for record in records]

    def _outputs(self, records: list[_Record]) -> Iterator[RequestOutput]:
        yield from (record.output() for record in records if record.error is not None)
        for record in self._advance(records, None):
            yield record.output()

    def _advance(self, records: list[_Record], bar: Any) -> Iterator[_Record]:
        """Steps until all records are finished; yields each that has changed. Aborts them if left early."""
        live = [record for record in records if record.error is None]
        try:
            while live:
                if not any(record.changed for record in live):
                    self._step()
                still = []
                for record in live:
                    if record.changed:
                        record.changed = False
                        if record.finished and bar is not None:
                            bar.update()
                        yield record
                    if not record.finished:
                        still.append(record)
                live = still
        finally:
            for record in records:
                if not record.finished:
                    self.engine.abort(record.request_id)
                for seq in record.sequences:
                    self._records.pop(seq, None)

    def _step(self) -> None:
        """One step of the engine, and its text into whichever records it belongs to."""
        for advance in self.engine.step():
            record = self._records.get(advance.seq)
            if record is not None:  # else its reader has left
                record.changed = True
                self._take_text(record, advance.seq)

    def _take_text(self, record: _Record, seq: Sequence) -> None:
        stream = record.streams[seq.index]
        if stream is None:
            return
        ids = seq.output_token_ids[stream.num_tokens :]
        ended_by_token = seq.finish_reason == "stop"
        if ended_by_token and not seq.params.include_stop_str_in_output:
            ids = ids[:-1]  # an end token, special or not, is no part of the text
        text = stream.append(ids)
        if seq.finish_reason is not None:
            text += stream.finish()
        record.texts[seq.index] += text
        if stream.stop_reason is not None and not ended_by_token:
            self.engine.finish(seq, "stop", stream.stop_reason, stream.num_tokens)

    def _bad_word_ids(self, word: str) -> list[list[int]]:
        """A bad word at the start of a text and after a space: its token ids in both places."""
        assert self.tokenizer is not None
        forms = [self.tokenizer.encode_plain(text) for text in (word, " " + word.lstrip())]
        return [ids for i, ids in enumerate(forms) if ids and ids not in forms[:i]]

    # Care

    def warmup(self, *, use_tqdm: bool = True) -> None:
        """Compiles all programs of the buckets; after it nothing compiles."""
        programs = self.engine.config.buckets.programs()
        with tqdm(total=len(programs), desc="compile", disable=None if use_tqdm else True) as bar:
            self.engine.warmup(progress=lambda program: bar.update())

    def stats(self) -> SchedulerStats:
        """Rows, pages, preemptions and cached tokens so far."""
        return self.engine.scheduler.stats()

    def close(self) -> None:
        """Frees device memory; the LLM cannot be used after it."""
        self.engine.close(weights=self._owns_weights)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name == "trust_remote_code" and not value:
            continue
        reason = RENAMED_OPTIONS.get(name, "there is no such option")
        raise TypeError(f"LLM({name}={value!r}): {reason}")


def _is_single(prompts: Any) -> bool:
    """One prompt: a string, a dict, or a list of token ids."""
    if isinstance(prompts, str | Mapping):
        return True
    return len(prompts) > 0 and not isinstance(prompts[0], str | Mapping | Seq)


def _token_ids(ids: Any) -> list[int]:
    ids = list(ids)
    if not ids:
        raise ValueError("the prompt has no tokens; give at least one")
    wrong = [i for i in ids if isinstance(i, bool) or not hasattr(i, "__index__")]
    if wrong:
        raise ValueError(f"a prompt is text or token ids; {wrong[0]!r} is no token id")
    return [int(i) for i in ids]


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts; give one, or one for each")
    return list(value)


def _raise_single(records: list[_Record], single: bool) -> None:
    if single and records[0].error is not None:
        raise ValueError(records[0].error)


def _hash64(seed: int, number: int) -> int:
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
