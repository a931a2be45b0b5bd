"""The command ``python -m ddtree_numba decode``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddtree_numba.decode.loop import BACKENDS, MODES, STAGES, Decoded, decode, load, logit_gap
from ddtree_numba.decode.model_file import ModelFileError

if TYPE_CHECKING:
    from rich.console import Console

    from ddtree_numba.decode.model import Loaded

# Two float32 logits that should be equal differ by no more than this: the model adds up some thousands of terms.
NEAR_TIE = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="several give one batch")
    parser.add_argument("--raw", action="store_true", help="take the text as it is, without the model's chat template")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file; default: SmolLM2-135M-Instruct")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default: cuda where there is a GPU")
    parser.add_argument("--mode", choices=MODES, default="tree", help="default: tree")
    parser.add_argument("--budget", type=int, default=16, help="nodes beside the root, a chain's length (default: 16)")
    parser.add_argument("--draft-positions", type=int, default=8, help="how far a tree looks ahead (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a reply (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, the likeliest token each time")
    parser.add_argument("--top-k", type=int, default=0, help="sample from so many tokens; default: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from so much probability; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; the others' are the next numbers")
    parser.add_argument("--no-compare", action="store_true", help="do not decode a second time, one token a step")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw acceptance and the last tree (.svg, .png)")


def run(options: argparse.Namespace) -> int:
    """Decode, print, compare; returns the exit code: 0, 1 where tokens differ or nothing could be decoded."""
    try:
        return _run(options)
    except (ModelFileError, OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
    except ImportError as error:
        print(f'error: {error}. This needs: pip install "ddtree-numba[decode]"', file=sys.stderr)
    return 1


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    console, notes = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    with notes.status("reading the model"):
        loaded = load(options.model, options.backend)
    streaming = not options.json and len(options.prompt) == 1
    pieces = loaded.tokenizer.stream()

    def show(_: int, tokens: list[int], num_accepted: int) -> None:
        """What the drafter guessed in colour, and what the model added as it is."""
        for n, token in enumerate(tokens):
            console.print(pieces(token), end="", style="green" if n < num_accepted - 1 else None, markup=False)

    settings = {
        name: getattr(options, name)
        for name in ("budget", "draft_positions", "max_tokens", "temperature", "top_k", "top_p", "seed")
    }
    settings |= {"loaded": loaded, "chat": not options.raw}
    compared = options.mode != "autoregressive" and not options.no_compare
    if loaded.model.xp is not np:
        with notes.status("compiling kernels"):  # the clock of a reply is not to count that
            for mode in (options.mode, "autoregressive") if compared else (options.mode,):
                decode(options.prompt, mode=mode, **{**settings, "max_tokens": 1})
    replies = decode(options.prompt, mode=options.mode, on_tokens=show if streaming else None, **settings)
    if streaming:
        console.print()
    elif not options.json:
        for prompt, reply in zip(options.prompt, replies, strict=True):
            console.print(f"> {prompt}", style="bold", markup=False)
            console.print(reply.text, markup=False)
    if options.plot is not None:
        from ddtree_numba.decode.plot import plot

        plot(replies, loaded.tokenizer, options.plot)
    same, verdicts = True, []
    plain: list[Decoded] = []
    if compared:
        with notes.status("decoding again, one token a step"):
            plain = decode(options.prompt, mode="autoregressive", **settings)
        for n, (reply, other) in enumerate(zip(replies, plain, strict=True)):
            equal, verdict = _compare(reply, other, loaded)
            same = same and equal
            verdicts.append(f"prompt {n + 1}: {verdict}" if len(replies) > 1 else verdict)
    if options.json:
        as_dicts = [reply.as_dict() for reply in replies]
        print(json.dumps({"replies": as_dicts, "same": same if plain else None, "verdicts": verdicts}, indent=2))
    else:
        _print_statistics(console, replies, plain)
        for verdict in verdicts:
            console.print(verdict, style=None if same else "red")
    return 0 if same else 1


def _compare(reply: Decoded, plain: Decoded, loaded: Loaded) -> tuple[bool, str]:
    """Whether both are the same, near-ties aside, and a sentence about it."""
    pairs = zip(reply.tokens, plain.tokens, strict=False)
    at = next((n for n, (mine, other) in enumerate(pairs) if mine != other), None)
    if at is None and len(reply.tokens) == len(plain.tokens):
        return True, f"the same {len(plain.tokens)} tokens as one token a step gives"
    if at is None:
        return False, f"{len(reply.tokens)} tokens, where one token a step gives {len(plain.tokens)}"
    gap = logit_gap(loaded.model, plain.prompt_tokens + plain.tokens[:at])
    verdict = f"differs from token {at + 1} on, where the two likeliest logits are {gap:.2g} apart"
    return gap <= NEAR_TIE, verdict + (": a near-tie, which rounding decides" if gap <= NEAR_TIE else "")


def _print_statistics(console: Console, replies: list[Decoded], plain: list[Decoded]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("prompt", "tokens", "steps", "acceptance length", "tokens/s", "one a step", "repeated 4-grams"):
        table.add_column(name, justify="right")
    for n, reply in enumerate(replies):
        alone = f"{plain[n].tokens_per_second:.1f}" if plain else ""
        found = (len(reply.tokens), len(reply.runs), f"{reply.acceptance_length:.2f}")
        table.add_row(
            *map(str, (n + 1, *found)), f"{reply.tokens_per_second:.1f}", alone, f"{reply.repeated_4grams:.0%}"
        )
    console.print(table)
    spent = replies[0].stages
    shares = [f"{name} {spent[name]:.2f} s ({spent[name] / replies[0].seconds:.0%})" for name in STAGES]
    console.print("time: " + ", ".join(shares))
