"""The planted-table model: a Llama whose next-token logits are exactly the row table[last token].

Embedding = identity, so a token's hidden state is one-hot; o_proj and down_proj are zero, so the layer adds
nothing; the final norm multiplies by 1 / sqrt(1/V + eps), which the head takes back. Whatever a request asks
of sampling, stopping or logprobs is then computable from the table in numpy, and any text can be forced by a
chain of large logits.
"""

from typing import Any

import numpy as np
from tiny_models import random_normal, weight_shapes


def make_planted(table: np.ndarray) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """table [V, V], row = last token -> (config.json as a dict, Hugging Face name -> float32 array)."""
    vocab = table.shape[0]
    if table.shape != (vocab, vocab):
        raise ValueError(f"the table must be square, got shape {table.shape}")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": vocab,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    weights = {name: random_normal(name, shape, 0.02) for name, shape in weight_shapes(config).items()}
    for name, value in weights.items():
        if "norm" in name:
            weights[name] = np.ones_like(value)
        elif "o_proj" in name or "down_proj" in name:
            weights[name] = np.zeros_like(value)
    weights["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32)
    head = table.T.astype(np.float64) * np.sqrt(1 / vocab + config["rms_norm_eps"])
    weights["lm_head.weight"] = head.astype(np.float32)  # [V out, V in]
    return config, weights


def random_table(vocab: int, key: str, std: float = 2.0) -> np.ndarray:
    """float32[V, V] of random logits, the same everywhere for the same key."""
    return random_normal(key, (vocab, vocab), std)


def plant_chain(table: np.ndarray, tokens: list[int], logit: float = 30.0) -> np.ndarray:
    """A copy of the table in which greedy decoding from tokens[0] gives the rest of tokens."""
    if len(set(tokens[:-1])) != len(tokens) - 1:
        raise ValueError(f"a token of the chain would have two successors: {tokens}")
    table = table.copy()
    table[tokens[:-1], tokens[1:]] = logit
    return table


def next_logprobs(table: np.ndarray, last_token: int) -> np.ndarray:
    """float64[V]: log of the exact next-token distribution."""
    logits = table[last_token].astype(np.float64)
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


def greedy(table: np.ndarray, last_token: int, n: int) -> list[int]:
    """The n ids that follow last_token under greedy decoding."""
    ids = []
    for _ in range(n):
        last_token = int(table[last_token].argmax())
        ids.append(last_token)
    return ids
