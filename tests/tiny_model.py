"""A tiny Llama-layout model as a real GGUF file, and a numpy forward pass that shares no code with the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np


@dataclass
class Tiny:
    """Shape of the model; ``metadata`` overrides keys (None removes one), ``tensors`` overrides or adds tensors."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    inner: int = 128
    vocab: int = 96
    context: int = 4096
    seed: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray | None] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def weights(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        kv = self.kv_heads * self.head_dim

        def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

        made: dict[str, np.ndarray] = {"token_embd.weight": matrix(self.vocab, self.hidden, 8.0)}
        for i in range(self.layers):
            made |= {
                f"blk.{i}.attn_norm.weight": (1 + 0.1 * rng.standard_normal(self.hidden)).astype(np.float32),
                f"blk.{i}.ffn_norm.weight": (1 + 0.1 * rng.standard_normal(self.hidden)).astype(np.float32),
                f"blk.{i}.attn_q.weight": matrix(self.hidden, self.hidden, 2.0),
                f"blk.{i}.attn_k.weight": matrix(kv, self.hidden, 2.0),
                f"blk.{i}.attn_v.weight": matrix(kv, self.hidden, 2.0),
                f"blk.{i}.attn_output.weight": matrix(self.hidden, self.hidden, 2.0),
                f"blk.{i}.ffn_gate.weight": matrix(self.inner, self.hidden, 2.0),
                f"blk.{i}.ffn_up.weight": matrix(self.inner, self.hidden, 2.0),
                f"blk.{i}.ffn_down.weight": matrix(self.hidden, self.inner, 2.0),
            }
        made["output_norm.weight"] = np.ones(self.hidden, np.float32)
        for name, value in self.tensors.items():
            if value is None:
                del made[name]
            else:
                made[name] = value
        return made

    def keys(self) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "llama.block_count": self.layers,
            "llama.context_length": self.context,
            "llama.embedding_length": self.hidden,
            "llama.feed_forward_length": self.inner,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 10000.0,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": vocabulary(self.vocab),
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.eos_token_id": 95,
        }
        keys.update(self.metadata)
        return {key: value for key, value in keys.items() if value is not None}

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in self.keys().items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, value in self.weights().items():
            writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def vocabulary(size: int) -> list[str]:
    """Printable characters as they stand for themselves in byte-level BPE, then one merge, then fillers."""
    letters = [chr(c) for c in range(33, 33 + 90)]
    return [*letters, "ab", *(f"<{i}>" for i in range(size - 91))][:size]


def judge(model: Tiny, prompt: list[int], tokens: int) -> list[int]:
    """Greedy tokens of one row, float64, recomputing everything at every step."""
    weights = {name: value.astype(np.float64) for name, value in model.weights().items()}
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(np.argmax(_logits(model, weights, ids))))
    return ids[len(prompt) :]


def _logits(model: Tiny, w: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    x = w["token_embd.weight"][ids]
    count, hd = len(ids), model.head_dim
    angles = np.arange(count)[:, None] / (10000.0 ** (np.arange(0, hd, 2) / hd))
    cos, sin = np.cos(angles), np.sin(angles)
    mask = np.triu(np.full((count, count), -np.inf), 1)

    def norm(v: np.ndarray, g: np.ndarray) -> np.ndarray:
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-5) * g

    def rope(v: np.ndarray) -> np.ndarray:  # [count, heads, head_dim], pairs side by side
        even, odd = v[..., 0::2], v[..., 1::2]
        out = np.empty_like(v)
        out[..., 0::2] = even * cos[:, None] - odd * sin[:, None]
        out[..., 1::2] = even * sin[:, None] + odd * cos[:, None]
        return out

    for i in range(model.layers):
        p = f"blk.{i}."
        h = norm(x, w[p + "attn_norm.weight"])
        q = rope((h @ w[p + "attn_q.weight"].T).reshape(count, model.heads, hd))
        k = rope((h @ w[p + "attn_k.weight"].T).reshape(count, model.kv_heads, hd))
        v = (h @ w[p + "attn_v.weight"].T).reshape(count, model.kv_heads, hd)
        group = model.heads // model.kv_heads
        heads = []
        for head in range(model.heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(hd) + mask
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, head // group])
        x = x + np.concatenate(heads, -1) @ w[p + "attn_output.weight"].T
        h = norm(x, w[p + "ffn_norm.weight"])
        gate = h @ w[p + "ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "ffn_up.weight"].T)) @ w[p + "ffn_down.weight"].T
    head = w.get("output.weight", w["token_embd.weight"])
    return norm(x[-1], w["output_norm.weight"]) @ head.T
