"""Writes tests/golden/smollm2.{json,npz}: greedy tokens and top-5 logprobs, by transformers in float64."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smollm2_prompts import CHATS, PLAIN
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama

GOLDEN = Path(__file__).parents[1] / "golden"
NUM_TOKENS = 48
TOP = 5


def all_in_float64() -> None:
    """Replaces the three parts of transformers' Llama that compute in float32 whatever the weights are."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def rope(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        theta, head_dim = self.config.rope_parameters["rope_theta"], self.config.head_dim
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = (position_ids[:, :, None].double() * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    def attend(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        k, v = (modeling_llama.repeat_kv(x, module.num_key_value_groups) for x in (k, v))
        scores = q @ k.transpose(2, 3) * scaling
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    modeling_llama.LlamaRMSNorm.forward = norm
    modeling_llama.LlamaRotaryEmbedding.forward = rope
    modeling_llama.eager_attention_forward = attend


def load_tokenizer(file: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers' conversion drops the rule that each digit stands alone (tokenizer.ggml.pre = "smollm")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def make_prompts(tokenizer: Any) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = [{"name": name, "text": text} for name, text in PLAIN.items()]
    for name, messages in CHATS.items():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append({"name": name, "messages": messages, "text": text})
    for prompt in prompts:
        prompt["token_ids"] = tokenizer(prompt["text"], add_special_tokens=False)["input_ids"]
        if tokenizer.decode(prompt["token_ids"], clean_up_tokenization_spaces=False) != prompt["text"]:
            raise SystemExit(f"prompt {prompt['name']} does not survive tokenizing and decoding")
    return prompts


def greedy(model: torch.nn.Module, token_ids: list[int]) -> list[int]:
    """NUM_TOKENS greedy tokens through transformers' KV cache; the end token is an ordinary token."""
    out = model(torch.tensor([token_ids]), use_cache=True)
    ids = [int(out.logits[0, -1].argmax())]
    while len(ids) < NUM_TOKENS:
        out = model(torch.tensor([ids[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        ids.append(int(out.logits[0, -1].argmax()))
    return ids


@torch.inference_mode()
def main(file: Path) -> None:
    tokenizer = load_tokenizer(file)
    all_in_float64()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.double()  # the file's values are exact in float32
    prompts = make_prompts(tokenizer)
    dtypes = {"token_ids": "u2", "first_end": "i4", "top_ids": "u2", "top_logprobs": "f4", "gaps": "f4"}
    rows: dict[str, list[Any]] = {name: [] for name in dtypes}
    for prompt in prompts:
        ids = greedy(model, prompt["token_ids"])
        # logprobs from a second way: one full forward without a cache
        logits = model(torch.tensor([prompt["token_ids"] + ids[:-1]]), use_cache=False).logits[0]
        assert logits.dtype == torch.float64
        top = logits[-NUM_TOKENS:].log_softmax(-1).topk(TOP)
        gaps = top.values[:, 0] - top.values[:, 1]
        differs = top.indices[:, 0] != torch.tensor(ids)
        if (differs & (gaps > 1e-3)).any():
            raise SystemExit(f"prompt {prompt['name']}: with and without the KV cache disagree")
        end = model.config.eos_token_id
        rows["token_ids"].append(ids)
        rows["first_end"].append(ids.index(end) if end in ids else -1)
        rows["top_ids"].append(top.indices.numpy())
        rows["top_logprobs"].append(top.values.numpy())
        rows["gaps"].append(gaps.numpy())
        print(f"{prompt['name']}: {len(prompt['token_ids'])} tokens, smallest gap {gaps.min():.5f}")
        print("    " + repr(tokenizer.decode(ids)), flush=True)

    np.savez_compressed(GOLDEN / "smollm2.npz", **{k: np.array(v).astype(dtypes[k]) for k, v in rows.items()})
    lines = ",\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    (GOLDEN / "smollm2.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: smollm2.py FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf")
    main(Path(sys.argv[1]).resolve())
