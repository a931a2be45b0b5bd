"""A small Llama model in a GGUF file, and the same model in float64, written another way."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2, 96, 6, 2, 16, 80
ROPE_BASE, EPSILON, CONTEXT = 500.0, 1e-5, 320
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def byte_letters() -> list[str]:
    """GPT-2's printable stand-in of each byte: the printable ones of Latin-1 stand for themselves."""
    itself = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in itself else chr(next(others)) for b in range(256)]


MERGES = ["t h", "th e", "Ġ the", "i n", "Ġ a", "1 2"]
TOKENS = [*CONTROL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]


def weights(seed: int = 5) -> dict[str, np.ndarray]:
    """By GGUF's names; large enough that attention and logits are far from flat."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(WIDTH)).astype(np.float32)

    found = {"token_embd": matrix(len(TOKENS), WIDTH, 6.0), "output_norm": norm()}
    for n in range(LAYERS):
        layer = {"attn_norm": norm(), "ffn_norm": norm()}
        layer |= {"attn_q": matrix(HEADS * HEAD_DIM, WIDTH, 2.0), "attn_k": matrix(KV_HEADS * HEAD_DIM, WIDTH, 2.0)}
        layer |= {"attn_v": matrix(KV_HEADS * HEAD_DIM, WIDTH), "attn_output": matrix(WIDTH, HEADS * HEAD_DIM, 9.0)}
        layer |= {
            "ffn_gate": matrix(HIDDEN, WIDTH),
            "ffn_up": matrix(HIDDEN, WIDTH),
            "ffn_down": matrix(WIDTH, HIDDEN, 9.0),
        }
        found |= {f"blk.{n}.{name}": array for name, array in layer.items()}
    return {f"{name}.weight": array for name, array in found.items()}


def write_model(path: Path, *, architecture: str = "llama", pre: str = "smollm") -> Path:
    """A GGUF file of these weights and a tokenizer of all bytes and a few merges."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(TEMPLATE)
    for name, array in weights().items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_logits(ids: list[int]) -> np.ndarray:
    """Logits [n, V] behind each token of a text, in float64: no cache, complex rotations, one head at a time."""
    w = {name.removesuffix(".weight"): array.astype(np.float64) for name, array in weights().items()}
    n = len(ids)
    turns = np.exp(1j * np.outer(np.arange(n), ROPE_BASE ** (-2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)))

    def norm(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + EPSILON) * by

    def rotated(x: np.ndarray) -> np.ndarray:
        turned = (x[:, 0::2] + 1j * x[:, 1::2]) * turns
        return np.stack([turned.real, turned.imag], axis=2).reshape(n, HEAD_DIM)

    x = w["token_embd"][ids]
    for layer in range(LAYERS):
        of = {name.split(".", 2)[2]: array for name, array in w.items() if name.startswith(f"blk.{layer}.")}
        y = norm(x, of["attn_norm"])
        heads = []
        for h in range(HEADS):
            g = h * KV_HEADS // HEADS
            q = rotated(y @ of["attn_q"][h * HEAD_DIM : (h + 1) * HEAD_DIM].T)
            k = rotated(y @ of["attn_k"][g * HEAD_DIM : (g + 1) * HEAD_DIM].T)
            v = y @ of["attn_v"][g * HEAD_DIM : (g + 1) * HEAD_DIM].T
            scores = np.where(np.tri(n, dtype=bool), q @ k.T / np.sqrt(HEAD_DIM), -np.inf)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(p / p.sum(axis=1, keepdims=True) @ v)
        x = x + np.concatenate(heads, axis=1) @ of["attn_output"].T
        y = norm(x, of["ffn_norm"])
        gate = y @ of["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ of["ffn_up"].T)) @ of["ffn_down"].T
    return norm(x, w["output_norm"]) @ w["token_embd"].T
