"""The decode loop: a draft tree at each step, verified by the model in one pass, until the reply ends."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddtree_numba.accept.accepted import BAD_TARGET, STOPPED
from ddtree_numba.decode.drafter import Drafter, PromptLookup
from ddtree_numba.decode.mirror_step import MirrorStep
from ddtree_numba.decode.model import Attend, Llama, Loaded
from ddtree_numba.decode.model_file import model_file
from ddtree_numba.device import runtime
from ddtree_numba.step import DecodeStep
from ddtree_numba.tree.draft_tree import DraftTree

MODES = ("tree", "chain", "autoregressive")
BACKENDS = ("auto", "cuda", "numpy")
STAGES = ("draft", "build", "verify", "accept")
PREFILL = 256  # rows of the prompt at once

OnTokens = Callable[[int, list[int], int], None]


@dataclass
class Decoded:
    """The reply to one prompt.

    Attributes
    ----------
    prompt_tokens, tokens : list of int
        What the model was given, and what it said.
    text : str
        The same as text, without control tokens.
    runs : list of int
        Tokens of each step: the accepted ones and one of the target's own, which is num_accepted of the step.
    stopped : bool
        Whether the model ended the reply itself; else ``max_tokens`` did.
    seconds : float
        Of the whole batch, prefill not counted.
    stages : dict of str to float
        The same by stage, in seconds: draft, build (candidates, tree), verify (the model), accept (walk, cache).
    last_tree : DraftTree, optional
        Of the last step, in NumPy arrays; with it the batch's slot of this request and the nodes accepted.
    """

    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    runs: list[int] = field(default_factory=list)
    stopped: bool = False
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    last_tree: tuple[DraftTree, int, list[int]] | None = None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step, the root counted, as papers report it."""
        return sum(self.runs) / len(self.runs) if self.runs else 0.0

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def repeated_4grams(self) -> float:
        """Share of the reply's runs of four tokens that occurred before in it."""
        grams = Counter(zip(*(self.tokens[n:] for n in range(4)), strict=False))
        return 1 - len(grams) / grams.total() if grams else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "acceptance_length": self.acceptance_length,
            "tokens_per_second": self.tokens_per_second,
            "repeated_4grams": self.repeated_4grams,
            "stopped": self.stopped,
            "runs": self.runs,
            "seconds": self.seconds,
            "stages": self.stages,
        }


def choose_backend(backend: str) -> Any:
    """numpy or cupy.

    Raises
    ------
    ValueError
        There is no such backend.
    RuntimeError
        ``"cuda"`` without a usable GPU or without CuPy.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(map(repr, BACKENDS))}")
    if backend == "numpy" or backend == "auto" and not runtime.has_gpu():
        return np
    if not runtime.has_gpu():
        raise RuntimeError(f'backend="cuda" needs a GPU: {runtime.REASON}')
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError('backend="cuda" needs CuPy: pip install "ddtree-numba[cu13]"') from error
    return cupy


def load(path: str | os.PathLike[str] | None = None, backend: str = "auto") -> Loaded:
    """The model and its tokenizer, for several calls of `decode`.

    Parameters
    ----------
    path : str or os.PathLike, optional
        A GGUF file; by default SmolLM2-135M-Instruct, downloaded once (`model_file`).
    backend : str
        "cuda", "numpy", or "auto": cuda where there is a GPU.

    Raises
    ------
    ValueError, RuntimeError
        As in `choose_backend` and `Loaded.from_file`.
    FileNotFoundError, ModelFileError
        As in `model_file`.
    """
    xp = choose_backend(backend)
    return Loaded.from_file(model_file(path), xp)


def decode(
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    loaded: Loaded | None = None,
    backend: str = "auto",
    mode: str = "tree",
    budget: int = 16,
    draft_positions: int = 8,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = True,
    drafter: Drafter | None = None,
    on_tokens: OnTokens | None = None,
) -> list[Decoded]:
    """Decode prompts in one batch.

    Parameters
    ----------
    prompts : str, or list of str or of lists of int
        Texts, or tokens.
    loaded : Loaded, optional
        What `load` gave.
    backend : str
        For loading, where ``loaded`` is not given.
    mode : str
        "tree"; "chain", a tree of one branch; or "autoregressive", one token a step.
    budget : int
        Nodes of a tree beside the root; a chain's length.
    draft_positions : int
        How far a tree looks ahead.
    max_tokens : int
        At most so many tokens a reply.
    temperature : float
        0: the likeliest token each time. Above: samples of the model's law, the same ones in each mode.
    top_k, top_p : int, float
        Limits of sampling, as in `target_probs`.
    seed : int
        Of the first prompt; the others' are the next numbers.
    chat : bool
        Put texts into the model's chat template.
    drafter : callable, optional
        `PromptLookup` by default; see ddtree_numba/decode/drafter.py.
    on_tokens : callable, optional
        ``on_tokens(prompt, tokens, num_accepted)`` is called after each step for each prompt that goes on: all but the
        last of ``num_accepted`` tokens were the drafter's, the last was the target's.

    Returns
    -------
    list of Decoded
        One a prompt.

    Raises
    ------
    ValueError
        There is no such mode; a size, a temperature or a limit is out of range; a prompt has no tokens, or more with
        ``max_tokens`` than the model's context; a token is none.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(map(repr, MODES))}")
    for name, value in (("budget", budget), ("draft_positions", draft_positions), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if not 0 <= temperature < np.inf:
        raise ValueError(f"temperature is {temperature}; it must be at least 0 and finite")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")
    if loaded is None:
        loaded = load(backend=backend)
    model, tokenizer = loaded.model, loaded.tokenizer
    if mode == "autoregressive":
        budget, draft_positions = 0, 1
    elif mode == "chain":
        draft_positions = budget
    replies = [Decoded(_tokens_of(prompt, tokenizer, chat)) for prompt in _listed(prompts)]
    longest = max((len(reply.prompt_tokens) for reply in replies), default=1)
    for reply in replies:
        _require_fit(reply.prompt_tokens, max_tokens, budget, model)
    if not replies:
        return []

    xp, batch = model.xp, len(replies)
    step_class: Any = MirrorStep if xp is np else DecodeStep
    step = step_class(
        xp.zeros(1, np.float32),
        batch=batch,
        draft_positions=draft_positions,
        vocabulary=model.config.vocabulary,
        tree_budget=budget,
        candidates=1 if mode == "chain" else None,
        sampled=temperature > 0,
        stop_tokens=[tokenizer.eos],
    )
    controls = {}
    if temperature > 0:
        controls = {
            "seeds": xp.arange(seed, seed + batch, dtype=np.int64),
            "temperature": xp.full(batch, temperature, np.float32),
            "top_k": xp.full(batch, top_k, np.int32),
            "top_p": xp.full(batch, top_p, np.float32),
        }
    caches = model.new_caches(batch, longest + max_tokens + budget + 1)
    roots = xp.asarray([reply.prompt_tokens[-1] for reply in replies], np.int32)
    lengths = xp.asarray([len(reply.prompt_tokens) - 1 for reply in replies], np.int32)

    clock = _Clock(xp)

    def forward(tree: DraftTree, positions: Any, live_lengths: Any) -> Any:
        clock.stop("build")
        if xp is np and mode == "autoregressive":
            attend: Attend = model.attend_plainly(caches, live_lengths)
        else:
            variant = "three_phase_numpy" if xp is np else "auto"
            attend = model.attend_tree(caches, live_lengths, tree.tree_mask, variant)
        logits = model.logits(tree.input_ids, positions, attend)
        clock.stop("verify")
        return logits

    drafter = drafter or PromptLookup()
    shape = (batch, draft_positions, model.config.vocabulary)
    live = list(range(batch))
    with _calm_blas(xp):
        first: dict[tuple[int, ...], int] = {}
        for b, reply in enumerate(replies):
            same = first.setdefault(tuple(reply.prompt_tokens), b)
            if same == b:
                _prefill(model, [cache[b : b + 1] for cache in caches], reply.prompt_tokens[:-1])
            else:  # several samples of one prompt
                for cache in caches:
                    cache[b] = cache[same]
        clock.start()
        while live:
            draft = np.zeros(shape, np.float32)
            if budget:
                contexts = [replies[b].prompt_tokens + replies[b].tokens for b in live]
                draft[live] = drafter(contexts, *shape[1:])
            draft = xp.asarray(draft)
            clock.stop("draft")
            accepted = step(draft, roots, lengths, forward, kv_caches=caches, **controls).to_host()
            clock.stop("accept")
            for b in list(live):
                reply, flags, count = replies[b], int(accepted.flags[b]), int(accepted.num_accepted[b])
                emitted = [int(token) for token in accepted.tokens[b] if token >= 0]
                emitted = emitted[: max_tokens - len(reply.tokens)]
                reply.tokens += emitted
                reply.runs.append(count)
                reply.stopped = bool(flags & STOPPED) and emitted[-1:] == [tokenizer.eos]
                if on_tokens is not None:
                    on_tokens(b, emitted, count)
                if flags & (STOPPED | BAD_TARGET) or len(reply.tokens) == max_tokens:
                    live.remove(b)
                    roots[b] = -1
                    reply.last_tree = step.tree.to_host(), b, accepted.nodes[b, :count].tolist()
    for reply in replies:
        reply.seconds, reply.stages = sum(clock.spent.values()), dict(clock.spent)
        reply.text = tokenizer.decode(reply.tokens)
    return replies


@contextmanager
def _calm_blas(xp: Any) -> Iterator[None]:
    """Half of the cores for NumPy's matrix products.

    Products of a few rows are short, and OpenBLAS's threads wait for each other by spinning: with a core less than they
    think that they have, they were eight times slower than a single thread.
    """
    if xp is not np:
        yield
        return
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=max(1, (os.cpu_count() or 1) // 2), user_api="blas"):
        yield


def next_logits(model: Llama, ids: Sequence[int]) -> np.ndarray:
    """Logits [V] of the token behind these, on the host, in one pass that knows nothing of trees."""
    xp = model.xp
    caches = model.new_caches(1, len(ids))
    _prefill(model, caches, ids[:-1])
    last, lengths = xp.asarray([ids[-1:]], np.int32), xp.asarray([len(ids) - 1], np.int32)
    logits = model.logits(last, lengths[:, None], _causal(model, caches, lengths))[0, 0]
    found: np.ndarray = logits if xp is np else logits.get()
    return found


def logit_gap(model: Llama, ids: Sequence[int]) -> float:
    """How far the likeliest next token's logit is from the second one's: 0 is a tie, which rounding decides."""
    second, first = np.sort(next_logits(model, ids))[-2:]
    return float(first - second)


def _causal(model: Llama, caches: list[Any], lengths: Any) -> Attend:
    if model.xp is np:
        return model.attend_plainly(caches, lengths)
    return model.attend_tree(caches, lengths, None, "auto")


def _prefill(model: Llama, caches: list[Any], ids: Sequence[int]) -> None:
    """Fill the cache of one request with a prompt's rows."""
    xp = model.xp
    for first in range(0, len(ids), PREFILL):
        part = xp.asarray([ids[first : first + PREFILL]], np.int32)
        positions = first + xp.arange(part.shape[1], dtype=np.int32)[None]
        model.hidden(part, positions, _causal(model, caches, xp.asarray([first], np.int32)))


def _listed(prompts: Any) -> list[Any]:
    return [prompts] if isinstance(prompts, str) else list(prompts)


def _tokens_of(prompt: Any, tokenizer: Any, chat: bool) -> list[int]:
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    ids: list[int] = tokenizer.encode(tokenizer.chat(prompt) if chat else prompt)
    return ids


def _require_fit(ids: list[int], max_tokens: int, budget: int, model: Llama) -> None:
    if not ids:
        raise ValueError("a prompt has no tokens; it must have at least one")
    for token in ids:
        if not 0 <= token < model.config.vocabulary:
            raise ValueError(f"a prompt holds the token {token}; tokens are 0 to {model.config.vocabulary - 1}")
    needed, limit = len(ids) + max_tokens + budget, model.config.context_length
    if needed > limit:
        raise ValueError(
            f"a prompt of {len(ids)} tokens needs {needed} with max_tokens and budget; at most {limit} fit"
        )


class _Clock:
    """Seconds by stage; on a GPU each stage is waited for."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.spent = dict.fromkeys(STAGES, 0.0)

    def start(self) -> None:
        self.last = time.perf_counter()

    def stop(self, stage: str) -> None:
        if self.xp is not np:
            self.xp.cuda.get_current_stream().synchronize()
        now = time.perf_counter()
        self.spent[stage] += now - self.last
        self.last = now
