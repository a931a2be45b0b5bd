"""A Llama model from a GGUF file, in NumPy or CuPy: all that stands around attention.

Grouped-query attention runs through the MLA kernels exactly (docs/decode.md). With G KV heads of N columns each, a
cache row is the values and then the rotated keys of all KV heads, so kv_lora_rank = G N and D = 2 G N::

    cache row          [ V_0 .. V_{G-1} | K_0 .. K_{G-1} ]
    query of head h    [ 0 ..          0 | 0 .. q_h .. 0 ]    in the slot of its KV head's K
    latent output      [ o_0 .. o_{G-1} ]                     of which head h takes its KV head's slot

A query's zeros leave just its own head's dot product, and the weights are those of that head.

Source: github.com/ggml-org/llama.cpp (names of tensors; rotary embeddings of neighbouring columns), Llama 2 (arXiv
2307.09288).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_numba.attention.verify import verify_attention

Attend = Callable[[int, Any, Any, Any], Any]


@dataclass(frozen=True)
class Config:
    """Sizes of a model; ``head_dim`` is N, ``num_kv_heads`` G."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    context_length: int
    rope_base: float
    epsilon: float

    @property
    def kv_lora_rank(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def sm_scale(self) -> float:
        return float(self.head_dim**-0.5)


class Llama:
    """A model with float32 weights.

    Parameters
    ----------
    config : Config
    weights : dict of str to array
        By GGUF's names, float32, a matrix as [outputs, inputs]. Arrays of NumPy, or of CuPy if ``xp`` is.
    xp : module
        numpy or cupy.
    """

    def __init__(self, config: Config, weights: dict[str, Any], xp: Any = np) -> None:
        self.config, self.xp = config, xp

        def of(name: str) -> Any:
            return xp.asarray(weights[f"{name}.weight"])

        self.embedding = of("token_embd")
        self.head = of("output") if "output.weight" in weights else self.embedding
        self.last_norm = of("output_norm")
        self.layers = []
        for n in range(config.num_layers):
            layer = {name: of(f"blk.{n}.{name}") for name in ("attn_norm", "ffn_norm", "attn_output", "ffn_down")}
            layer["qkv"] = xp.concatenate([of(f"blk.{n}.attn_{x}") for x in "qkv"])
            layer["gate_up"] = xp.concatenate([of(f"blk.{n}.ffn_{x}") for x in ("gate", "up")])
            self.layers.append(layer)
        half = config.head_dim // 2
        angles = np.arange(config.context_length)[:, None] * config.rope_base ** (-np.arange(half) / half)
        self._cos, self._sin = (xp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))

    @classmethod
    def load(cls, reader: Any, xp: Any = np) -> Llama:
        """From a GGUF reader; all weights become float32.

        Raises
        ------
        ValueError
            The file holds no Llama model.
        """
        from gguf.quants import dequantize

        architecture = reader.fields["general.architecture"].contents()
        if architecture != "llama":
            raise ValueError(f"the file holds a model of architecture {architecture}; only llama is known here")

        def of(name: str) -> Any:
            return reader.fields[f"llama.{name}"].contents()

        weights = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
        heads, width = of("attention.head_count"), of("embedding_length")
        config = Config(
            num_layers=of("block_count"),
            width=width,
            num_heads=heads,
            num_kv_heads=of("attention.head_count_kv"),
            head_dim=width // heads,
            hidden=of("feed_forward_length"),
            vocabulary=len(weights["token_embd.weight"]),
            context_length=of("context_length"),
            rope_base=of("rope.freq_base"),
            epsilon=of("attention.layer_norm_rms_epsilon"),
        )
        return cls(config, weights, xp)

    def new_caches(self, batch: int, capacity: int) -> list[Any]:
        """A cache [B, capacity, 2 G N] for each layer, zeros."""
        shape = (batch, capacity, 2 * self.config.kv_lora_rank)
        return [self.xp.zeros(shape, np.float32) for _ in self.layers]

    def hidden(self, ids: Any, positions: Any, attend: Attend) -> Any:
        """What the head takes.

        Parameters
        ----------
        ids, positions : int32 [B, Q]
        attend : callable
            ``attend(layer, q, k, v)``: q [B, Q, H, N] and k [B, Q, G, N] rotated, v [B, Q, G, N]; gives [B, Q, H, N].

        Returns
        -------
        float32 [B, Q, width]
        """
        c = self.config
        batch, num_nodes = ids.shape
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        x = self.embedding[ids]
        for n, layer in enumerate(self.layers):
            qkv = self._norm(x, layer["attn_norm"]) @ layer["qkv"].T
            heads = qkv.reshape(batch, num_nodes, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            rotated = self._rotate(heads[:, :, : c.num_heads + c.num_kv_heads], cos, sin)
            q, k, v = rotated[:, :, : c.num_heads], rotated[:, :, c.num_heads :], heads[:, :, -c.num_kv_heads :]
            attended = attend(n, q, k, v)
            x = x + attended.reshape(batch, num_nodes, c.num_heads * c.head_dim) @ layer["attn_output"].T
            gate_up = self._norm(x, layer["ffn_norm"]) @ layer["gate_up"].T
            gate, up = gate_up[..., : c.hidden], gate_up[..., c.hidden :]
            with np.errstate(over="ignore"):  # exp of a large number is inf, and the quotient 0, as it should be
                x = x + (gate / (1 + self.xp.exp(-gate)) * up) @ layer["ffn_down"].T
        return self._norm(x, self.last_norm)

    def logits(self, ids: Any, positions: Any, attend: Attend) -> Any:
        """Logits [B, Q, V], float32, in nats; arguments as of `hidden`."""
        return self.hidden(ids, positions, attend) @ self.head.T

    def _norm(self, x: Any, weight: Any) -> Any:
        # In float32: a residual of 22,500, which the first token of SmolLM2 has, overflows float16 when squared.
        return x / self.xp.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.config.epsilon)) * weight

    def _rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        """Neighbouring columns are a pair: GGUF's order of Llama's columns, not the halves of other files."""
        even, odd = x[..., ::2], x[..., 1::2]
        return self.xp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)

    def write_rows(self, cache: Any, lengths: Any, k: Any, v: Any) -> None:
        """Put the rows of Q nodes behind each request's prefix."""
        batch, num_nodes = k.shape[:2]
        rows = lengths[:, None] + self.xp.arange(num_nodes, dtype=np.int32)
        row = self.xp.concatenate([v.reshape(batch, num_nodes, -1), k.reshape(batch, num_nodes, -1)], axis=2)
        cache[self.xp.arange(batch)[:, None], rows] = row

    def attend_tree(self, caches: list[Any], lengths: Any, tree_mask: Any, variant: str) -> Attend:
        """Tree-verify attention through `verify_attention`; the nodes' rows are written behind the prefixes first."""
        c, xp = self.config, self.xp
        slots = [slice(g * c.head_dim, (g + 1) * c.head_dim) for g in range(c.num_kv_heads)]
        per_slot = c.num_heads // c.num_kv_heads

        def attend(n: int, q: Any, k: Any, v: Any) -> Any:
            self.write_rows(caches[n], lengths, k, v)
            queries = xp.zeros((*q.shape[:3], 2 * c.kv_lora_rank), np.float32)
            keys = queries[..., c.kv_lora_rank :]
            for g, slot in enumerate(slots):
                keys[:, :, g * per_slot : (g + 1) * per_slot, slot] = q[:, :, g * per_slot : (g + 1) * per_slot]
            latent, _ = verify_attention(
                queries,
                caches[n],
                lengths,
                tree_mask,
                sm_scale=c.sm_scale,
                kv_lora_rank=c.kv_lora_rank,
                variant=variant,
            )
            parts = [latent[:, :, g * per_slot : (g + 1) * per_slot, slot] for g, slot in enumerate(slots)]
            return xp.concatenate(parts, axis=2)

        return attend

    def attend_plainly(self, caches: list[Any], lengths: Any) -> Attend:
        """Causal grouped-query attention in NumPy, which knows nothing of MLA, trees or this package's kernels."""
        c = self.config
        per_slot = c.num_heads // c.num_kv_heads

        def attend(n: int, q: Any, k: Any, v: Any) -> Any:
            self.write_rows(caches[n], lengths, k, v)
            num_nodes = q.shape[1]
            out = np.empty_like(q)
            for b, length in enumerate(lengths):
                num_keys = length + num_nodes
                rows = caches[n][b, :num_keys].reshape(num_keys, 2, c.num_kv_heads, c.head_dim)
                hidden = np.arange(num_keys) > length + np.arange(num_nodes)[:, None]
                for g in range(c.num_kv_heads):
                    heads = slice(g * per_slot, (g + 1) * per_slot)
                    scores = q[b, :, heads].swapaxes(0, 1) @ (rows[:, 1, g].T * np.float32(c.sm_scale))
                    scores[:, hidden] = -np.inf
                    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
                    weights /= weights.sum(axis=2, keepdims=True)
                    out[b, :, heads] = (weights @ rows[:, 0, g]).swapaxes(0, 1)
            return out

        return attend


@dataclass(frozen=True)
class Loaded:
    """A model and its tokenizer."""

    model: Llama
    tokenizer: Any

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], xp: Any = np) -> Loaded:
        """From a GGUF file; takes a few seconds.

        Raises
        ------
        ValueError
            The file is no GGUF file, or holds another model or tokenizer than is known here.
        """
        import gguf

        from ddtree_numba.decode.tokenizer import Tokenizer

        reader = gguf.GGUFReader(path)
        return cls(Llama.load(reader, xp), Tokenizer(reader))
