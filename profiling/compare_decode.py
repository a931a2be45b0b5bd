"""Our greedy tokens beside those of transformers, for the same GGUF file and the same token ids.

Run ``python profiling/compare_decode.py``; it needs PyTorch, transformers and accelerate, on the CPU. Prints a line a
prompt: how many tokens are equal and, where one differs, how far the two likeliest logits are apart there, by
transformers. The exit code is 1 if tokens differ where that gap is above NEAR_TIE. ``--csv FILE`` keeps the table.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from ddtree_numba.decode import decode, load, model_file
from ddtree_numba.decode.cli import NEAR_TIE

PROMPTS = (
    "Write the numbers from one to twenty as words.",
    "What is 17 plus 25? Show the steps.",
    "List 12345, 67890 and 3.14159 in reverse order.",
    "def fibonacci(n):",
    "Write a Python function that returns the largest of three numbers.",
    "Translate to German: The weather is nice today.",
    "Name three rivers in Europe.",
    "Was ist die Hauptstadt von Österreich?",
    "Repeat this sentence: the quick brown fox jumps over the lazy dog.",
    "Explain photosynthesis to a child.",
    "Write a haiku about rain.",
    "Give me a recipe for pancakes.",
    "<b>bold</b> and <i>italic</i>: what is this?",
    "SELECT name FROM users WHERE",
    "What comes next: 2, 4, 8, 16,",
    "Why is the sky blue?",
    "日本の首都はどこですか",
    "Summarize: Alice met Bob. Bob met Carol. Carol met Alice.",
    "🙂🙃 what do these mean?",
    "Hi",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    path = model_file()
    loaded = load(path, "numpy")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    console = Console(soft_wrap=True, highlight=False)
    rows, failed = [], False
    for prompt in track(PROMPTS, "decoding", console=Console(stderr=True)):
        (reply,) = decode(prompt, loaded=loaded, mode="autoregressive", max_tokens=options.max_tokens)
        ids = torch.tensor([reply.prompt_tokens])
        with torch.inference_mode():
            settings = {"do_sample": False, "max_new_tokens": options.max_tokens, "use_cache": True}
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings, eos_token_id=2, pad_token_id=2)
        wanted = out[0, ids.shape[1] :].tolist()
        pairs = enumerate(zip(reply.tokens, wanted, strict=False))
        equal = next((n for n, (mine, other) in pairs if mine != other), min(len(reply.tokens), len(wanted)))
        row = {"prompt": prompt, "tokens": len(wanted), "equal": equal, "gap": ""}
        if reply.tokens != wanted:
            with torch.inference_mode():
                logits = theirs(out[:, : ids.shape[1] + equal]).logits[0, -1].sort().values
            row["gap"] = float(logits[-1] - logits[-2])
            failed = failed or row["gap"] > NEAR_TIE
        rows.append(row)
        console.print(f"{equal:4d} of {len(wanted):4d} equal  {row['gap']}  {prompt}", markup=False)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy", "gguf")}
    console.print(" ".join(f"{name} {version}" for name, version in versions.items()))
    if options.csv is not None:
        temporary = options.csv.with_suffix(".tmp")
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], *versions])
            writer.writeheader()
            writer.writerows({**row, **versions} for row in rows)
        os.replace(temporary, options.csv)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
