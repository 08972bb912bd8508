"""lm-evaluation-harness on this engine: its model "jaxinfer" (needs the extra `jaxinfer[eval]`).

The harness (0.4.13) finds no models outside its own package, so its command line is started from here:

    python -m jaxinfer.tools.eval_adapter --model jaxinfer --model_args pretrained=org/name --tasks hellaswag

takes all arguments of `lm_eval`. In Python, `lm_eval.simple_evaluate(model=JaxinferLM(...), tasks=[...])`.
"""

import logging
from pathlib import Path
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxinfer.llm import LLM
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text import chat, prompts
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.tools.gen_kwargs import acting

logger = logging.getLogger(__name__)


@register_model("jaxinfer")
class JaxinferLM(LM):
    """The harness's three questions, put to an `LLM`.

    What is longer than `max_model_len` loses tokens on the left, with a warning. The harness's own transformers
    model sees one token more there: it never feeds the last one, which here takes a place like any other.

    Args:
      pretrained: what `LLM` takes as its model, or an `LLM` that is there already.
      batch_size: rows that run at the same time (`max_num_seqs`); 1, which the harness sends when nobody chose,
        and "auto" leave it to `LLM`.
      max_gen_toks: most tokens of an answer, where a task does not say.
      max_batch_size, device: of the harness, and refused, since neither can act here; "cuda:0" is what the harness
        sends when nobody chose.
      options: of `LLM`, such as dtype or max_model_len.
    """

    def __init__(
        self,
        pretrained: str | Path | LLM,
        *,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if max_batch_size is not None:
            raise ValueError(f"max_batch_size={max_batch_size}: nothing is tried out here; use batch_size")
        if device not in (None, "cuda:0"):
            raise ValueError(f"device={device!r}: JAX chooses the device; set JAX_PLATFORMS instead")
        if str(batch_size) not in ("1", "auto"):
            if "max_num_seqs" in options:
                raise ValueError(f"batch_size={batch_size} and max_num_seqs mean the same; give one of them")
            options["max_num_seqs"] = int(batch_size)
        if isinstance(pretrained, LLM) and options:
            raise ValueError(f"{', '.join(options)}: an LLM that is there already takes no more options")
        self.llm = pretrained if isinstance(pretrained, LLM) else LLM(pretrained, **options)
        logger.info("jaxinfer runs on %s", self.llm.device_choice)
        self.max_gen_toks = max_gen_toks
        self._name = "an LLM" if isinstance(pretrained, LLM) else str(pretrained)

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.llm.tokenizer is None:
            raise ValueError(
                "the harness asks in text, and this LLM has no tokenizer; give LLM(tokenizer=...)"
            )
        return self.llm.tokenizer

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(sum of logprobs, each token the most probable one) of each (context, continuation)."""
        pairs = [prompts.encode_pair(self._tokenizer, *request.args) for request in requests]
        return self._score(pairs, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Logprob of each (text,), in windows of `max_model_len` tokens in which no token is scored twice."""
        begin, _ = prompts.encode_pair(self._tokenizer, [], [0])  # what stands before the first token
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self._tokenizer.encode(*request.args),
                    prefix_token=begin[0],
                    max_seq_len=self.llm.max_model_len - 1,  # and one for the token before the window
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scores = iter(self._score([pair for pairs in windows for pair in pairs], disable_tqdm))
        return [sum(next(scores)[0] for _ in pairs) for pairs in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text of each (context, gen_kwargs) before its first stop string; greedy unless a task samples.

        Raises:
          ValueError, TypeError: a task's gen_kwargs are unknown to `SamplingParams` or out of range.
        """
        ids, params = [], []
        for request in requests:
            context, gen_kwargs = request.args
            param = _sampling_params(gen_kwargs, self.max_gen_toks)
            room = self.llm.max_model_len - (param.max_tokens or 0)
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={param.max_tokens} leaves no room for a prompt in max_model_len="
                    f"{self.llm.max_model_len}; lower it"
                )
            ids.append(_fit(prompts.tokenize(self._tokenizer, context)[1], room))
            params.append(param)
        if not ids:
            return []
        outputs = self.llm.generate(ids, params, use_tqdm=not disable_tqdm)
        for i, output in enumerate(outputs):
            if output.error is not None:
                raise ValueError(f"request {i}: {output.error}")
        return [output.outputs[0].text for output in outputs]

    def _score(
        self, pairs: list[tuple[list[int], list[int]]], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        if not pairs:
            return []
        contexts = []
        for i, (before, after) in enumerate(pairs):
            room = self.llm.max_model_len - len(after)
            if room < 1:
                raise ValueError(
                    f"request {i}: a continuation of {len(after)} tokens does not fit max_model_len="
                    f"{self.llm.max_model_len} with a token before it"
                )
            contexts.append(_fit(before, room))
        results = self.llm.loglikelihood(contexts, [after for _, after in pairs], use_tqdm=not disable_tqdm)
        return [(result.logprob, result.is_greedy) for result in results]

    # Chat: the harness renders conversations to text, and asks with that.

    @property
    def tokenizer_name(self) -> str:
        """Tells the harness's request caches apart."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the model's chat template, for the harness's records."""
        if isinstance(chat_template, str):
            raise ValueError(
                f"chat template {chat_template!r} cannot be chosen; the model's default one is taken"
            )
        return (self._tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, control tokens included; open at its end where no answer is asked for.

        Raises:
          ValueError: read as text, it would be other tokens than those of `LLM.chat`: some SentencePiece
            tokenizers lose spaces, and control tokens in a message would come alive.
        """
        ids = chat.render(self._tokenizer, chat_history, continue_final_message=not add_generation_prompt)
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        if self._tokenizer.encode(text, add_special_tokens=False) != ids:
            raise ValueError(
                f"this conversation is not the same tokens when it is written as text, {text[:80]!r}...; run "
                "without --apply_chat_template"
            )
        return text


def _sampling_params(gen_kwargs: dict[str, Any], max_gen_toks: int) -> SamplingParams:
    given = dict(normalize_gen_kwargs(gen_kwargs, max_gen_toks))
    temperature = given.pop("temperature", None)
    if not given.pop("do_sample"):
        temperature = 0.0
    elif temperature is None:
        temperature = 1.0  # transformers' default, and ours
    stop = [text for text in given.pop("until") if text]
    return SamplingParams(
        temperature=temperature, stop=stop, max_tokens=given.pop("max_gen_toks"), **acting(given)
    )


def _fit(ids: list[int], room: int) -> list[int]:
    """The last `room` of the ids; says so if that is not all."""
    if len(ids) > room:
        logger.warning("a prompt of %d tokens is cut to its last %d", len(ids), room)
    return ids[-room:]


if __name__ == "__main__":
    cli_evaluate()
