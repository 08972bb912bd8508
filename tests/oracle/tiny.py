"""Writes tests/golden/tiny/NAME.npz: logits and greedy tokens of the tiny models, by transformers."""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
from tiny_models import CONFIGS, checksum, make_tiny, random_tokens  # noqa: E402

MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
NUM_GREEDY = 20


def load(name: str) -> tuple[torch.nn.Module, int]:
    config, weights = make_tiny(name)
    config_class, model_class = MODELS[config["model_type"]]
    model = model_class(config_class(**config, attn_implementation="eager")).float().eval()
    state = {key: torch.from_numpy(value) for key, value in weights.items()}
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model, checksum(weights)


def logits_of(model: torch.nn.Module, token_ids: list[int]) -> np.ndarray:
    """f32[T, V]"""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(i32[20] ids, f32[20] gaps between the best and the second logit)"""
    ids: list[int] = []
    gaps = []
    for _ in range(NUM_GREEDY):
        last = logits_of(model, prompt + ids)[-1]
        second, best = np.sort(last)[-2:]
        ids.append(int(last.argmax()))
        gaps.append(best - second)
    return np.array(ids, np.int32), np.array(gaps, np.float32)


@torch.inference_mode()
def main() -> None:
    for name in CONFIGS:
        model, crc = load(name)
        golden: dict[str, np.ndarray] = {"checksum": np.array(crc)}
        for length, n in (("short", 24), ("long", 70)):
            prompt = random_tokens(f"{name}/{length}", n)
            logits = logits_of(model, prompt)
            golden[f"{length}_prompt"] = np.array(prompt, np.int32)
            golden[f"{length}_greedy"], golden[f"{length}_gaps"] = greedy(model, prompt)
            if length == "long":
                golden["long_positions"] = np.array([*range(0, n, 5), n - 1], np.int32)
                logits = logits[golden["long_positions"]]
            golden[f"{length}_logits"] = logits
        path = TESTS / "golden" / "tiny" / f"{name}.npz"
        np.savez_compressed(path, **golden)
        print(
            f"{name}: {path.stat().st_size // 1000} kB, logits std {golden['short_logits'].std():.2f}, "
            f"smallest gap {min(golden['short_gaps'].min(), golden['long_gaps'].min()):.4f}, "
            f"{len(set(golden['short_greedy'].tolist()))} different greedy tokens"
        )


if __name__ == "__main__":
    main()
