"""Decoding real text on this GPU: equal tokens in every mode, the law of samples, and where the time goes, as CSV.

``python profiling/bench_decode.py --out profiling/results/nvidia-h200`` writes three files there:

- decode_tokens.csv: a row for each prompt and mode, tree and chain: how many of the tokens are those of decoding one at
  a time, and, where one differs, how far the two likeliest logits are apart there. `PROMPTS` in batches of `BATCH`, and
  the first few alone. Several processes share the prompts, so nothing is timed here.
- decode_samples.csv: a row for each mode: `SAMPLES` sampled beginnings of three tokens beside the model's own
  probabilities of all of them. p_value is how often draws from these are as far off, by chi-square; flatter_p_value
  is that of a wrong law, of a temperature a fifth higher, which such a test must notice.
- decode.csv: a row for each mode and batch size: acceptance length, tokens per second, and milliseconds a step of each
  stage. Alone on the GPU; a warm-up of a few tokens goes ahead.

The exit code is 1 if tokens differ where the gap is above NEAR_TIE, or a sample's law is improbable. Needs the extra
``decode``, CuPy, PyTorch and nvidia-ml-py, and the model (``--model``, or its download).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

import numpy as np
from harness import MACHINE, Gpu, commit_here
from rich.console import Console
from rich.progress import track
from tables import write_rows

from ddtree_numba.decode import decode, load, logit_gap
from ddtree_numba.decode.cli import NEAR_TIE
from ddtree_numba.decode.loop import STAGES, next_logits
from ddtree_numba.device import runtime

Row = dict[str, Any]

TASKS = (
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "What is {}?",
    "Repeat this sentence five times: I like to read about {}.",
    "Write a dialogue of two friends who talk about {}.",
    "Translate to German: We learn about {} today.",
    "Write a Python function that prints a fact about {}.",
    "Give three reasons why people study {}.",
    "Count from one to twenty, then say something about {}.",
)
SUBJECTS = (
    *("rain", "the moon", "prime numbers", "bread", "volcanoes", "chess", "the Roman Empire", "bees", "electricity"),
    *("the sea", "glass", "music", "maps", "sleep", "trains", "the number 12345", "snow", "gold", "trees", "Vienna"),
)
PROMPTS = tuple(task.format(subject) for subject in SUBJECTS for task in TASKS)
BATCH, ALONE = 8, 20  # requests at once; prompts that are also decoded alone
MODES = ("tree", "chain")
SAMPLED_TEXT = "red blue red blue red blue red blue red blue red"
SAMPLES, SAMPLE_BATCH = 8192, 256
SAMPLE_TOKENS, TOP_K, TEMPERATURE = 3, 4, 1.5  # 4**3 beginnings, all of which can be listed
DRAWS, LEAST_PROBABLE = 10000, 1e-3

TOKENS = ("prompt", "mode", "B", "tokens", "equal", "gap", "acceptance_length", *MACHINE)
SAMPLE = ("mode", "samples", "beginnings", "p_value", "flatter_p_value", "acceptance_length", *MACHINE)
SPEED = (
    *("mode", "B", "budget", "max_tokens", "tokens", "steps", "acceptance_length", "tokens_per_second"),
    *(f"{stage}_ms" for stage in STAGES),
    *("step_ms", *MACHINE),
)

_loaded: Any = None


def start(model: Path | None) -> None:
    """Load the model once a process."""
    global _loaded
    _loaded = load(model, "cuda")


def compare(job: tuple[tuple[str, ...], int]) -> list[Row]:
    """Both modes beside one token a step, for prompts of one batch."""
    prompts, max_tokens = job
    plain = decode(prompts, loaded=_loaded, mode="autoregressive", max_tokens=max_tokens)
    rows = []
    for mode in MODES:
        replies = decode(prompts, loaded=_loaded, mode=mode, max_tokens=max_tokens)
        for prompt, reply, wanted in zip(prompts, replies, plain, strict=True):
            row = {"prompt": prompt, "mode": mode, "B": len(prompts), "tokens": len(wanted.tokens), "gap": ""}
            equal = first_difference(reply.tokens, wanted.tokens)
            if reply.tokens != wanted.tokens:
                row["gap"] = f"{logit_gap(_loaded.model, wanted.prompt_tokens + wanted.tokens[:equal]):.2e}"
            rows.append({**row, "equal": equal, "acceptance_length": f"{reply.acceptance_length:.3f}"})
    return rows


def first_difference(found: Sequence[int], wanted: Sequence[int]) -> int:
    """How many tokens agree from the start."""
    pairs = zip(found, wanted, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(found), len(wanted)))


def law(model: Any, ids: list[int], stop: int) -> dict[tuple[int, ...], float]:
    """Probabilities of all beginnings of three tokens; one that stops before is shorter."""
    beginnings: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(SAMPLE_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for beginning, probability in beginnings.items():
            if beginning and beginning[-1] == stop:
                longer[beginning] = probability
                continue
            logits = next_logits(model, ids + list(beginning)).astype(np.float64) / TEMPERATURE
            best = np.argsort(-logits, kind="stable")[:TOP_K]
            weights = np.exp(logits[best] - logits[best[0]])
            for token, weight in zip(best, weights / weights.sum(), strict=True):
                longer[(*beginning, int(token))] = probability * float(weight)
        beginnings = longer
    return beginnings


def p_value(counts: Counter[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """How often draws from the law are as far from it, by chi-square, as these counts; 0 if one has no probability."""
    if set(counts) - set(probabilities):
        return 0.0
    total = counts.total()
    expected = total * np.array(list(probabilities.values()))
    draws = np.random.default_rng(0).multinomial(total, expected / expected.sum(), size=DRAWS)
    seen = np.array([counts[beginning] for beginning in probabilities])
    farther = (np.square(draws - expected) / expected).sum(1) >= (np.square(seen - expected) / expected).sum()
    return float((1 + np.count_nonzero(farther)) / (1 + DRAWS))


def flatter(probabilities: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """A wrong law: that of a temperature a fifth higher."""
    powers = {key: value ** (1 / 1.2) for key, value in probabilities.items()}
    return {key: value / sum(powers.values()) for key, value in powers.items()}


def sampled_row(mode: str) -> Row:
    """Sampled beginnings beside the model's law, and beside a wrong one."""
    tokenizer, model = _loaded.tokenizer, _loaded.model
    ids = tokenizer.encode(SAMPLED_TEXT)
    expected = law(model, ids, tokenizer.eos)
    counts: Counter[tuple[int, ...]] = Counter()
    runs: list[int] = []
    for seed in range(0, SAMPLES, SAMPLE_BATCH):
        replies = decode(
            [ids] * SAMPLE_BATCH,
            loaded=_loaded,
            mode=mode,
            budget=8,
            draft_positions=SAMPLE_TOKENS,
            max_tokens=SAMPLE_TOKENS,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            seed=seed,
        )
        counts.update(tuple(reply.tokens) for reply in replies)
        runs += [run for reply in replies for run in reply.runs]
    return {
        "mode": mode,
        "samples": SAMPLES,
        "beginnings": len(expected),
        "p_value": f"{p_value(counts, expected):.4f}",
        "flatter_p_value": f"{p_value(counts, flatter(expected)):.4f}",
        "acceptance_length": f"{np.mean(runs):.3f}",
    }


def speed_row(mode: str, batch: int, max_tokens: int) -> Row:
    """Stages of one mode and batch size."""
    prompts, budget = PROMPTS[:batch], 16
    decode(prompts, loaded=_loaded, mode=mode, max_tokens=4, budget=budget)
    replies = decode(prompts, loaded=_loaded, mode=mode, max_tokens=max_tokens, budget=budget)
    steps = max(len(reply.runs) for reply in replies)
    tokens, seconds = sum(len(reply.tokens) for reply in replies), replies[0].seconds
    runs = list(itertools.chain.from_iterable(reply.runs for reply in replies))
    return {
        "mode": mode,
        "B": batch,
        "budget": budget if mode != "autoregressive" else 0,
        "max_tokens": max_tokens,
        "tokens": tokens,
        "steps": steps,
        "acceptance_length": f"{np.mean(runs):.3f}",
        "tokens_per_second": f"{tokens / seconds:.1f}",
        **{f"{stage}_ms": f"{1e3 * replies[0].stages[stage] / steps:.3f}" for stage in STAGES},
        "step_ms": f"{1e3 * seconds / steps:.3f}",
    }


def main(arguments: list[str] | None = None) -> int:
    """Compare, sample, time, write; 1 when tokens or a law are wrong, 2 when nothing can be measured here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("profiling/results/local"), help="folder for the CSV files")
    parser.add_argument("--commit", help="commit that is measured; default: what git says")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file; default: SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many are compared; default: all")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a reply; default: 128")
    parser.add_argument("--workers", type=int, default=8, help="processes that compare; default: 8")
    options = parser.parse_args(arguments)
    if runtime.SIMULATOR:
        print(f"this measures a GPU, and there is none: {runtime.REASON}", file=sys.stderr)
        return 2
    console = Console(stderr=True)
    gpu = Gpu(options.commit or commit_here(), 1)
    machine = gpu.machine()

    some = PROMPTS[: options.prompts]
    jobs = [(some[n : n + BATCH], options.max_tokens) for n in range(0, len(some), BATCH)]
    jobs += [((prompt,), options.max_tokens) for prompt in some[:ALONE]]
    with multiprocessing.get_context("spawn").Pool(options.workers, start, (options.model,)) as pool:
        done = track(pool.imap(compare, jobs), "comparing", total=len(jobs), console=console)
        tokens = [{**row, **machine} for rows in done for row in rows]
    write_rows(options.out / "decode_tokens.csv", tokens, TOKENS)
    start(options.model)
    sampled = [{**sampled_row(mode), **machine} for mode in track(MODES, "sampling", console=console)]
    write_rows(options.out / "decode_samples.csv", sampled, SAMPLE)
    cases = [(mode, batch) for batch in (1, BATCH) for mode in (*MODES, "autoregressive")]
    speed = []
    for mode, batch in track(cases, "timing", console=console):
        speed.append({**speed_row(mode, batch, options.max_tokens), **gpu.machine()})
    write_rows(options.out / "decode.csv", speed, SPEED)

    differing = [row for row in tokens if row["gap"] != ""]
    print(f"{len(tokens) - len(differing)} of {len(tokens)} replies equal one token a step")
    for row in differing:
        where = f"{row['equal']} of {row['tokens']} equal, gap {row['gap']}, {row['mode']}, B = {row['B']}"
        print(f"{where}: {row['prompt']}")
    for row in sampled + speed:
        print(" ".join(f"{name} {value}" for name, value in row.items() if name not in MACHINE))
    wrong = any(float(row["gap"]) > NEAR_TIE for row in differing)
    return int(wrong or any(float(row["p_value"]) < LEAST_PROBABLE for row in sampled))


if __name__ == "__main__":
    sys.exit(main())
