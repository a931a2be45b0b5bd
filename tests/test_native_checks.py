"""The C++ checks of refs/native: they pass on the reference files and fail on wrong values and wrong implementations,
print what Python computes of the same results to the last digit, and stay in their arrays whatever a file holds."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddtree_numba import check, kdtr
from refs import accept

ROOT = Path(__file__).resolve().parents[1]
INCLUDE, REFS, NATIVE = ROOT / "ddtree_numba" / "include", ROOT / "refs", ROOT / "refs" / "native"
PAGE = ROOT / "docs" / "native.md"

# Of each implementation the files that its check takes.
PATTERNS = {
    "verify_attn": ("verify_attn",),
    "merge_states": ("merge_states",),
    "topk_logprobs": ("topk_logprobs",),
    "build_tree": ("build_tree",),
    "tree_encodings": ("tree_encodings",),
    "accept": ("argmax_tokens", "accept_greedy", "accept_sampled", "target_probs", "compact_kv", "verify_tree_greedy"),
}
FILES = {name: [path for p in start for path in sorted(REFS.rglob(f"{p}_*.kdtr"))] for name, start in PATTERNS.items()}
EVERY_FILE = sorted(REFS.rglob("*.kdtr"))
each_program = pytest.mark.parametrize("name", PATTERNS)

FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", str(INCLUDE), "-I", str(NATIVE)]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compiler(*arguments: str | Path) -> None:
    subprocess.run(["g++", *FLAGS, *map(str, arguments)], check=True, timeout=300)


def all_programs() -> str:
    """All programs as one source, whose first argument is a program's name: the headers are compiled once, not seven
    times. Each is in a namespace of its own, since all of them have the same names inside."""
    programs = [*(f"check_{name}" for name in PATTERNS), "kdtr_list"]
    includes = ['#include "check.hpp"', "#include <cinttypes>", *(f'#include "{name}.hpp"' for name in PATTERNS)]
    inside = [
        f'#define main main_of\nnamespace of_{program} {{\n#include "{program}.cpp"\n}}\n#undef main'
        for program in programs
    ]
    calls = [
        f'    if (std::strcmp(argv[1], "{program}") == 0) return of_{program}::main_of(argc - 1, argv + 1);'
        for program in programs
    ]
    return "\n".join([*includes, *inside, "int main(int argc, char** argv) {", *calls, "    return 99;", "}\n"])


@dataclass(frozen=True)
class Built:
    """Where the programs and their objects are. All are under the sanitizers, which end a program at the first fault;
    the implementations are so in one of them, "sanitized", and in the other, "plain", as users compile them."""

    folder: Path

    def run(self, program: str, *arguments: str | Path, kind: str = "plain") -> tuple[int, list[str]]:
        return run(self.folder / kind, program, *arguments)

    def with_implementation(self, folder: Path, name: str, source: str, *flags: str) -> Path:
        """The programs with another source in the place of one implementation."""
        folder.mkdir()
        (folder / f"{name}.cpp").write_text(source, encoding="utf-8")
        # A wrong implementation may well leave a variable unused.
        compiler("-w", *flags, "-c", folder / f"{name}.cpp", "-o", folder / f"{name}.o")
        others = [self.folder / f"plain_{other}.o" for other in PATTERNS if other != name]
        compiler(*SANITIZERS, self.folder / "all.o", folder / f"{name}.o", *others, "-o", folder / "programs")
        return folder / "programs"


def run(executable: Path, program: str, *arguments: str | Path) -> tuple[int, list[str]]:
    options = {name: "exitcode=99:halt_on_error=1" for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS")}
    done = subprocess.run(
        [executable, program, *arguments], capture_output=True, encoding="utf-8", timeout=120, env=os.environ | options
    )
    assert done.returncode in (0, 1, 2), done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Built:
    fcntl = pytest.importorskip("fcntl")
    # Workers of one run share what the first of them compiles.
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "native_programs"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "sanitized").exists():
            (folder / "all.cpp").write_text(all_programs(), encoding="utf-8")
            # Not optimized: under the sanitizers that takes three times as long.
            compiler(*SANITIZERS, "-c", folder / "all.cpp", "-o", folder / "all.o")
            for kind, flags in (("plain", ["-O2"]), ("sanitized", SANITIZERS)):
                for name in PATTERNS:
                    compiler(*flags, "-c", NATIVE / f"{name}.cpp", "-o", folder / f"{kind}_{name}.o")
                objects = [folder / f"{kind}_{name}.o" for name in PATTERNS]
                compiler(*SANITIZERS, folder / "all.o", *objects, "-o", folder / kind)
    return Built(folder)


def small(files: list[Path]) -> list[Path]:
    """Those that a program under the sanitizers is through with at once."""
    return [path for path in files if path.stat().st_size < 1_000_000]


# What passes


def test_every_reference_file_has_a_check():
    assert sorted(path for files in FILES.values() for path in files) == EVERY_FILE


@each_program
def test_reference_files_pass_under_the_sanitizers(built, name):
    code, lines = built.run(f"check_{name}", *small(FILES[name]), kind="sanitized")
    assert code == 0 and len(lines) == len(small(FILES[name])) > 0


@each_program
def test_wrong_usage_is_exit_code_2(built, tmp_path, name):
    for arguments in ([], ["--save"], ["--save", tmp_path], ["--help"], ["--safe", tmp_path, FILES[name][0]]):
        assert built.run(f"check_{name}", *arguments) == (2, [])
    assert not list(tmp_path.iterdir())


# Agreement with Python


@dataclass(frozen=True)
class Exact:
    """How many elements of a result that must be equal are not."""

    name: str
    differ: int
    size: int
    passed: bool

    @classmethod
    def compare(cls, name: str, found: np.ndarray, wanted: np.ndarray) -> Exact:
        if name.startswith("kv_cache_"):
            found, wanted = found.view(np.uint8), wanted.view(np.uint8)
        differ = int(np.count_nonzero(found != wanted))
        return cls(name, differ, wanted.size, differ == 0)

    def __str__(self) -> str:
        return f"{self.name} {f'{self.differ} of {self.size} differ' if self.differ else 'equal'}"


def measured(tensors: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> tuple[str, bool]:
    """What a check prints of these results, and whether they pass: by Python's own check, which here gets them in place
    of those of a kernel."""
    operator = bytes(tensors["operator"]).decode()
    if operator == "verify_attention":
        return verify_measured(tensors, found)
    if operator == "tree_encodings":
        reports: Any = [Exact.compare(name, found[name], tensors[name]) for name in found]
    else:
        variant = {"compact_kv": "kernel", "build_tree": "heap_numpy", "topk_logprobs": "rounds_numpy"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check, "_run", lambda variant, inputs, results, call: (found, 0.0))
            patch.setattr(check, "_exact", Exact.compare)
            _, reports, _ = check.OPERATORS[operator].check(tensors, variant.get(operator, "kernel_numpy"), None)
    texts = []
    for report in reports:
        if isinstance(report, Exact):
            texts.append(str(report))
        else:
            error = np.inf if report.max_abs_error is None else report.max_abs_error
            sign = "<=" if report.passed else ">"
            texts.append(f"{report.name} {error:.3e} {sign} {report.max_abs:.3e}")
    return "  ".join(texts), all(report.passed for report in reports)


def verify_measured(tensors: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> tuple[str, bool]:
    out, wanted = (x["out"].astype(np.float64).reshape(-1) for x in (found, tensors))
    lse, wanted_lse = (x["lse"].astype(np.float64).reshape(-1) for x in (found, tensors))
    with np.errstate(invalid="ignore"):
        errors = np.where(out == wanted, 0, np.abs(out - wanted))
        lse_errors = np.where(lse == wanted_lse, 0, np.abs(lse - wanted_lse))
    assert not np.isnan(errors).any() and not np.isnan(lse_errors).any()
    # Added one after the other, as the program does; np.sum adds in another order.
    frobenius = np.sqrt(np.cumsum(errors * errors)[-1] / np.cumsum(wanted * wanted)[-1])
    lse_error = (lse_errors / np.where(np.isfinite(wanted_lse), np.maximum(1, np.abs(wanted_lse)), 1)).max()
    of_logits = 2.0**-23 / 2.4 * float(tensors["logit_magnitude"]) * np.sqrt(float(tensors["q"].shape[3]))
    bound = max(1e-5, of_logits)
    passed = errors.max() <= bound * np.abs(wanted).max() and frobenius <= bound and lse_error <= 1e-5
    return f"max abs {errors.max():.3e}  rel fro {frobenius:.3e}  lse {lse_error:.3e}", bool(passed)


def assert_agreement(executable: Path, name: str, files: list[Path], folder: Path) -> list[str]:
    """What the check printed, once Python has printed the same of the saved results."""
    code, lines = run(executable, f"check_{name}", "--save", folder, *files)
    assert len(lines) == len(files)
    passes = []
    for path, line in zip(files, lines, strict=True):
        text, passed = measured(kdtr.read(path), kdtr.read(folder / path.name))
        assert line.startswith(f"{path}  {text}  {'ok' if passed else 'FAIL '}"), f"{line}\nPython: {text}"
        passes.append(passed)
    assert code == (0 if all(passes) else 1)
    return lines


@each_program
def test_python_computes_the_same_errors_from_the_saved_results(built, tmp_path, name):
    lines = assert_agreement(built.folder / "plain", name, FILES[name], tmp_path)
    assert all(line.endswith("  ok") for line in lines)


# The plain implementations work in double, so that their errors are 0 once rounded. Sums and exponentials in float are
# another matter: their digits tell whether both languages measure the same.
IN_FLOAT = ("verify_attn", "merge_states", "topk_logprobs", "accept", "build_tree")


@pytest.mark.parametrize("name", IN_FLOAT)
def test_python_computes_the_same_errors_of_float_arithmetic(built, tmp_path, name):
    source = (NATIVE / f"{name}.cpp").read_text(encoding="utf-8")
    narrow = re.sub(r"\bdouble\b(?!\* scores|\*? uniform)", "float", source)
    executable = built.with_implementation(tmp_path / "narrow", name, narrow, "-O1")
    lines = assert_agreement(executable, name, small(FILES[name]), tmp_path / "saved")
    if name != "build_tree":
        errors = set(re.findall(r"(?<![<>=] )\d\.\d{3}e-\d\d", "\n".join(lines)))
        assert len(errors) >= 2, "errors of 0 tell nothing"


def test_results_are_saved_but_never_over_the_file_itself(built, tmp_path):
    copy = tmp_path / "merge.kdtr"
    shutil.copy(FILES["merge_states"][0], copy)
    before = copy.read_bytes()
    code, (line,) = built.run("check_merge_states", "--save", tmp_path, copy)
    assert code == 1 and line.endswith("FAIL the results would replace the file itself")
    assert copy.read_bytes() == before
    code, _ = built.run("check_merge_states", "--save", tmp_path / "a" / "b", copy)
    assert code == 0 and sorted(kdtr.read(tmp_path / "a" / "b" / "merge.kdtr")) == ["lse", "out"]


# Wrong values


def edited(source: Path, target: Path, name: str, index: tuple[int, ...], value: Any) -> Path:
    tensors = dict(kdtr.read(source))
    tensors[name] = tensors[name].copy()
    tensors[name][index] = value
    kdtr.write(target, tensors)
    return target


def of(name: str) -> Path:
    return REFS / f"{name}.kdtr"


MERGE, TOPK, BUILD = of("merge_states_r32_f32"), of("topk_logprobs_v257_k16_f16"), of("build_tree_wide_l5_k6_b100")
ENDED, FORMS, WORDS = of("build_tree_ended_l5_k6_b32"), of("tree_encodings_q8"), of("tree_encodings_q65")
GREEDY, SAMPLED, A_NODE = (of(f"accept_{x}") for x in ("greedy_q24_int32", "sampled_v41_f32", "sampled_v40_bf16"))
ARGMAX, PROBS = of("argmax_tokens_v61_f32"), of("target_probs_v157_f32")
CACHE, PAGED, SGLANG = (
    of("compact_kv_contiguous_float32"),
    of("compact_kv_page16_uint8"),
    of("verify_tree_greedy_q16_int64"),
)


def next_up(value: np.generic) -> np.generic:
    return np.nextafter(value, type(value)(np.inf))


# File, tensor, index, the value that it gets, and what the check says. A function is given the value there.
EDITS: list[tuple[Path, str, tuple[int, ...], Any, str]] = [
    # The first row of a merge has an empty state a, the last one is an ordinary one.
    (MERGE, "out", (1, 4, 2, 31), 9, "FAIL out[1, 4, 2, 31] is 0.696711183, not 9"),
    (MERGE, "out", (1, 4, 2, 31), np.nan, ", not nan"),
    (MERGE, "out", (1, 4, 2, 31), lambda x: x + 2e-6, "FAIL out[1, 4, 2, 31] is"),
    (MERGE, "out", (0, 0, 0, 7), next_up, "out beside an empty state 1 of 256 differ  lse beside"),
    (MERGE, "lse", (1, 4, 2), np.inf, "lse inf > 4.768e-07"),
    (MERGE, "lse", (0, 0, 0), next_up, "FAIL lse beside an empty state[0, 0, 0] is 1.5, not 1.50000012"),
    (MERGE, "lse", (0, 1, 1), 0, "FAIL lse[0, 1, 1] is -inf, not 0"),  # both states are empty
    (MERGE, "lse_a", (1, 4, 2), 0, "FAIL out[1, 4, 2, "),
    (MERGE, "out_b", (1, 4, 2, 3), np.nan, "FAIL out[1, 4, 2, 3] is nan, not "),
    (MERGE, "operator", (0,), 65, "FAIL the operator is not merge_states"),
    # Row 0 has equal logits.
    (TOPK, "logprobs", (0, 0, 3), lambda x: x + 1e-4, "FAIL logprobs[0, 0, 3] is -5.54907608, not -5.54"),
    (TOPK, "logprobs", (0, 1, 0), np.inf, "logprobs inf > 4.768e-07"),  # a row with a NaN
    (TOPK, "token_ids", (0, 0, 3), 4, "FAIL token_ids[0, 0, 3] is 3, not 4"),
    (TOPK, "token_ids", (0, 1, 15), 0, "FAIL token_ids[0, 1, 15] is -1, not 0"),
    (TOPK, "token_ids", (0, 0, 3), 257, "FAIL token_ids is not 0 to V - 1"),
    (TOPK, "token_ids", (0, 0, 3), -1, "FAIL token_ids is not 0 to V - 1"),
    (TOPK, "logits", (0, 0, 256), np.nan, "token_ids 16 of 224 differ"),
    (TOPK, "k", (), 0, "FAIL k is not 1 to V"),
    (TOPK, "k", (), 258, "FAIL k is not 1 to V"),
    (TOPK, "k", (), 15, "tensor 'logprobs' has another shape than the others demand"),
    (TOPK, "operator", (0,), 65, "FAIL the operator is not topk_logprobs"),
    (BUILD, "tokens", (2, 100), 5, "FAIL tokens[2, 100] is "),
    (BUILD, "parents", (0, 0), 0, "FAIL parents[0, 0] is -1, not 0"),
    (BUILD, "depths", (0, 99), 9, "FAIL depths[0, 99] is "),
    (BUILD, "scores", (1, 50), next_up, "scores 1 of 303 differ"),
    (BUILD, "scores", (1, 50), np.nan, "not nan"),
    (BUILD, "num_nodes", (1,), 100, "FAIL num_nodes[1] is 101, not 100"),
    (BUILD, "tree_mask", (1, 100, 3), lambda x: x ^ (1 << 4), "FAIL tree_mask[1, 100, 3] is 16, not 0"),
    (BUILD, "first_child", (0, 0), 2, "FAIL first_child[0, 0] is 1, not 2"),
    (BUILD, "next_sibling", (0, 100), 5, "FAIL next_sibling[0, 100] is "),
    (BUILD, "input_ids", (2, 0), 1, "FAIL input_ids[2, 0] is 0, not 1"),
    (ENDED, "scores", (3, 32), 0, "FAIL scores[3, 32] is -inf, not 0"),
    (ENDED, "input_ids", (3, 32), -1, "FAIL input_ids[3, 32] is "),
    (BUILD, "logprobs", (0, 4, 0), np.nan, "parents "),
    (BUILD, "token_ids", (0, 0, 0), 7, "FAIL tokens[0, "),
    (BUILD, "root_tokens", (2,), 7, "FAIL tokens[2, 0] is 7, not 0, input_ids[2, 0] is 7, not 0"),
    (BUILD, "tree_budget", (), -1, "FAIL tree_budget is negative"),
    (BUILD, "tree_budget", (), 2**31 - 1, "tensor 'tokens' has another shape than the others demand"),
    (BUILD, "max_depth", (), 6, "FAIL max_depth is not min(L, tree_budget)"),
    (BUILD, "operator", (0,), 65, "FAIL the operator is not build_tree"),
    *[
        (FORMS, name, index, value, f"FAIL {name}[")
        for name, index, value in [
            *((name, (5, 7), 77) for name in ("depths", "first_child", "next_sibling", "positions", "retrieve_index")),
            *((name, (0, 0), -7) for name in ("retrieve_next_token", "retrieve_next_sibling")),
            *((f"{order}_first.{name}", (3, 1), 0) for order in ("breadth", "depth") for name in ("permutation",)),
            *((f"{order}_first.parents", (3, 7), 7) for order in ("breadth", "depth")),
            ("retrieve_indices", (0, 6, 7), 0),
            ("tree_mask", (5, 0, 0), 3),
            ("full_mask", (0,), False),
            ("full_mask", (823,), False),
            ("qlen_only_mask", (1,), True),
            ("bitpacked_mask", (47,), 0),
            ("tensorrt_mask", (0, 7, 0), -1),
            ("dense_bias", (0, 0, 1), 0),
            ("dense_bias", (0, 0, 0), np.nan),
        ]
    ],
    (FORMS, "parents", (0, 3), 3, "FAIL parents are not those of a tree"),
    (FORMS, "parents", (0, 3), -1, "FAIL parents are not those of a tree"),
    (FORMS, "parents", (2, 1), 0, "FAIL parents are not those of a tree"),  # of a tree of one node
    (FORMS, "num_nodes", (0,), 9, "FAIL num_nodes is not 1 to Q"),
    (FORMS, "num_nodes", (0,), 0, "FAIL num_nodes is not 1 to Q"),
    (FORMS, "max_depth", (), 6, "FAIL a node is deeper than max_depth"),  # the chain is
    (FORMS, "max_depth", (), 2**31 - 1, "tensor 'retrieve_indices' has another shape"),
    (FORMS, "cache_seqlens", (0,), -1, "FAIL cache_seqlens is not 0 to 2**30"),
    (FORMS, "cache_seqlens", (0,), 30, "tensor 'full_mask' has another shape"),
    (FORMS, "operator", (0,), 65, "FAIL the operator is not tree_encodings"),
    # Request 0 of the greedy walks goes to a leaf over nodes 0, 1, 3, 6 and 9.
    (GREEDY, "accepted.nodes", (0, 4), 8, "FAIL nodes[0, 4] is 9, not 8"),
    (GREEDY, "accepted.nodes", (1, 0), 0, "FAIL nodes[1, 0] is -1, not 0"),  # an idle request
    (GREEDY, "accepted.num_accepted", (0,), 4, "FAIL num_accepted[0] is 5, not 4"),
    (GREEDY, "accepted.bonus_tokens", (0,), -1, "FAIL bonus_tokens[0] is 99, not -1"),
    (GREEDY, "accepted.flags", (0,), 4, "FAIL flags[0] is 0, not 4"),
    (GREEDY, "accepted.tokens", (0, 4), 18, "FAIL tokens[0, 4] is 99, not 18"),
    (GREEDY, "target_tokens", (0, 6), -1, "FAIL nodes[0, 4] is -1, not 9, num_accepted[0] is 4, not 5"),
    (GREEDY, "tokens", (0, 9), 19, "nodes 1 of 224 differ"),
    (GREEDY, "first_child", (0, 0), -5, "flags[0] is 2, not 0"),
    (GREEDY, "stop_tokens", (0, 0), 12, "flags[0] is 4, not 0"),
    (GREEDY, "max_depth", (), -1, "FAIL max_depth is negative"),
    (GREEDY, "max_depth", (), 2**31 - 1, "tensor 'accepted.nodes' has another shape than the others demand"),
    (GREEDY, "operator", (0,), 65, "FAIL the operator is none of accept.hpp"),
    (SAMPLED, "seeded.tokens", (23, 0), 5, "FAIL seeded.tokens[23, 0] is "),
    (SAMPLED, "uniform.flags", (0,), 7, "FAIL uniform.flags[0] is "),
    (SAMPLED, "seeds", (23,), 5, "FAIL seeded."),
    (SAMPLED, "positions", (23,), 5, "FAIL seeded."),
    (A_NODE, "positions", (23, 0), 5, "FAIL seeded."),
    (SAMPLED, "uniforms", (23, 0), -1, "FAIL uniform."),
    (SAMPLED, "target_probs", (23, 0, 40), np.nan, "seeded.flags[23] is 1, not 0"),
    (ARGMAX, "target_tokens", (0, 0), 59, "FAIL target_tokens[0, 0] is 58, not 59"),
    (ARGMAX, "logits", (0, 0, 0), np.inf, "FAIL target_tokens[0, 0] is 0, not 58"),
    (ARGMAX, "logits", (0, 0, 60), np.nan, "FAIL target_tokens[0, 0] is -1, not 58"),
    (PROBS, "target_probs", (0, 0, 5), lambda x: x * 1.00001, "FAIL target_probs[0, 0, 5] is "),
    (PROBS, "target_probs", (3, 0, 0), 1e-30, "kept 1 of 6594 differ"),  # of temperature 0: not the best
    (PROBS, "target_probs", (0, 0, 5), np.inf, "target_probs inf > 4.768e-07"),
    (PROBS, "logits", (0, 0, 5), np.nan, "kept 157 of 6594 differ"),
    (PROBS, "temperature", (1,), 0.71, "FAIL target_probs[1, "),
    (PROBS, "temperature", (1,), np.nan, "FAIL target_probs[1, "),
    (PROBS, "top_k", (3,), 4, "kept["),
    (PROBS, "top_p", (4,), 0.5, "kept["),
    (PROBS, "top_p", (4,), 0, "kept["),
    (CACHE, "compacted.kv_cache_0", (0, 1, 11), 500, "FAIL kv_cache_0[0, 1, 4"),
    (CACHE, "compacted.kv_cache_1", (7, 39, 0, 0), -0.5, "FAIL kv_cache_1[7, 39, "),
    (CACHE, "compacted.cache_seqlens", (5,), 0, "FAIL cache_seqlens[5] is -2, not 0"),
    (CACHE, "gathered", (0, 8, 5), 1, "FAIL gathered[0, 8, 5] is 0, not 1"),
    (CACHE, "accepted.nodes", (0, 1), 0, "FAIL kv_cache_0[0, 1, "),
    (CACHE, "accepted.num_accepted", (0,), -1, "cache_seqlens[0] is 0, not "),
    (PAGED, "block_table", (0, 0), -1, "FAIL kv_cache_0["),
    (PAGED, "x", (0, 0, 0), 1, "FAIL gathered[0, 0, 0] is 1, not "),
    (SGLANG, "accepted.predicts", (95,), 0, "FAIL predicts[95] is -1095, not 0"),
    (SGLANG, "accepted.accept_index", (0, 0), 1, "FAIL accept_index[0, 0] is 0, not 1"),
    (SGLANG, "accepted.accept_token_num", (0,), 9, "FAIL accept_token_num[0] is "),
    (SGLANG, "retrive_index", (0, 0), 96, "FAIL predicts["),
    (SGLANG, "retrive_next_token", (0, 0), 16, "accept_token_num[0] is 0, not "),
    (SGLANG, "accept_token_num", (0,), 5, "  ok"),  # what stands there before is always replaced
]
PROGRAM = {start: name for name, starts in PATTERNS.items() for start in starts}


def program_of(path: Path) -> str:
    return next(name for start, name in PROGRAM.items() if path.name.startswith(f"{start}_"))


@pytest.mark.parametrize(("source", "tensor", "index", "value", "verdict"), EDITS)
def test_one_wrong_value_fails(built, tmp_path, source, tensor, index, value, verdict):
    value = value(kdtr.read(source)[tensor][index]) if callable(value) else value
    wrong = edited(source, tmp_path / "wrong.kdtr", tensor, index, value)
    code, (line, right) = built.run(f"check_{program_of(source)}", wrong, source)
    assert verdict in line and (verdict == "  ok") == ("  FAIL " not in line)
    assert code == (verdict != "  ok")
    assert right.endswith("  ok"), "one bad file must not hide the others"


# Wrong implementations

# Implementation, its text, what stands there instead, and what the check says of at least one of its files.
WRONG: list[tuple[str, str, str, str]] = [
    ("verify_attn", "peak + std::log(total)", "(peak + std::log(total)) / std::log(2.0)", "FAIL lse is off"),
    (
        "verify_attn",
        "if ((words[j / 32] >> (j % 32) & 1u) != 0)",
        "if (words != nullptr && j <= i)",
        "FAIL out: an element",
    ),
    ("merge_states", "(peak + std::log1p", "(1.4427 * peak + std::log1p", "FAIL lse["),
    ("merge_states", "!std::isinf(lse_b)", "lse_b != -std::numeric_limits<float>::infinity()", "is nan, not "),
    ("merge_states", "has_b ? b[c] : 0.0f", "has_b ? b[c] : a[c]", "out inf > "),
    ("topk_logprobs", " : x < y;", " : x > y;", "FAIL token_ids["),
    ("topk_logprobs", "if (std::isinf(peak))", "if (peak < 0 && std::isinf(peak))", "is nan, not -inf"),
    ("build_tree", ": ranks < other.ranks;", ": ranks > other.ranks;", "FAIL tokens["),
    (
        "build_tree",
        "best.score - logprob(depth - 1, rank) + logprob(depth - 1, rank + 1);",
        "best.score + (logprob(depth - 1, rank + 1) - logprob(depth - 1, rank));",
        "FAIL scores[0, 35] is -0.046904087081253584, not -0.046904087081253591",
    ),
    ("build_tree", "return std::isfinite(x); });", "return !std::isnan(x); });", "num_nodes[3] is 31, not 1"),
    ("build_tree", "(elder == -1 ? rows", "(elder != -2 ? rows", "FAIL first_child["),
    ("tree_encodings", "(elder == -1 ? e.first_child", "(elder != -2 ? e.first_child", "FAIL first_child["),
    ("tree_encodings", "(length) + e.depths[row + i]", "(length + i)", "FAIL positions["),
    ("tree_encodings", "? x.size() < y.size()", "? x.back() < y.back()", "FAIL breadth_first.permutation["),
    ("accept", "if ((flags & stopped) != 0) break;", "", "FAIL nodes[9, 3] is 6, not -1, num_accepted[9] is 5"),
    ("accept", "if (node == -1) bonus = token;", "bonus = token;", "FAIL bonus_tokens["),
    ("accept", "return token >= 0 &&", "return token > 0 &&", "FAIL nodes["),
    ("accept", "round < 10", "round < 9", "FAIL seeded."),
    ("accept", "<double>(p), 44)", "<double>(p), 43)", "FAIL seeded."),
    (
        "accept",
        "max_element(values, values + vocabulary) - values",
        "max_element(values + 1, values + vocabulary) - values",
        "FAIL target_tokens[",
    ),
    ("accept", "falling[static_cast<std::size_t>(top_k) - 1]", "falling[static_cast<std::size_t>(top_k)]", "kept["),
    ("accept", "sums[enough] / sum < top_p", "sums[enough] < top_p", "kept["),
    ("accept", "k = 0; k < count; ++k) {", "k = count; k-- > 0;) {", "FAIL kv_cache_0["),
    (
        "accept",
        "static_cast<std::int32_t>(accepted);",
        "static_cast<std::int32_t>(accepted + 1);",
        "FAIL accept_token_num[",
    ),
]


@pytest.mark.parametrize(("name", "right", "wrong", "verdict"), WRONG)
def test_a_wrong_implementation_fails_and_python_says_by_how_much(built, tmp_path, name, right, wrong, verdict):
    source = (NATIVE / f"{name}.cpp").read_text(encoding="utf-8")
    assert source.count(right) == 1
    executable = built.with_implementation(tmp_path / "wrong", name, source.replace(right, wrong))
    lines = assert_agreement(executable, name, small(FILES[name]), tmp_path / "saved")
    assert any(verdict in line for line in lines)


def test_implementations_that_write_nothing_fail_on_every_file(built, tmp_path):
    includes, functions = [], []
    for name in PATTERNS:
        includes.append(f'#include "{name}.hpp"')
        functions += re.findall(r"^void \w+\([^;]*\);", (NATIVE / f"{name}.hpp").read_text(encoding="utf-8"), re.M)
    assert len(functions) == 13
    stubs = [function.replace(");", ") {}") for function in functions]
    (tmp_path / "stubs.cpp").write_text("\n".join([*includes, *stubs]), encoding="utf-8")
    compiler("-w", *SANITIZERS, tmp_path / "stubs.cpp", built.folder / "all.o", "-o", tmp_path / "programs")
    for name, files in FILES.items():
        code, lines = run(tmp_path / "programs", f"check_{name}", *files)
        assert code == 1 and len(lines) == len(files)
        assert all("  FAIL " in line for line in lines)


# Whatever a file holds


def extreme(rng: random.Random, dtype: np.dtype) -> Any:
    if dtype.kind == "b":
        return rng.random() < 0.5
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return min(max(rng.choice([limits.min, limits.max, 2**31, -1, 0, 1, 7, 40, 64]), limits.min), limits.max)
    return rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, 1.5, 6e4, 1e-30])


def mutant(tensors: dict[str, np.ndarray], rng: random.Random) -> dict[str, np.ndarray]:
    """A sound file whose contents are not: up to three tensors with extreme elements, or of another shape or dtype."""
    tensors = {name: array.copy() for name, array in tensors.items()}
    for name in rng.sample(list(tensors), min(rng.randint(1, 3), len(tensors))):
        if name == "operator":
            continue
        array, kind = tensors[name], rng.randrange(10)
        if kind < 5:
            for _ in range(rng.randint(1, 4)):
                array.reshape(-1)[rng.randrange(array.size)] = extreme(rng, array.dtype)
        elif kind < 7:
            array[...] = extreme(rng, array.dtype)
        elif kind == 7:
            tensors[name] = array[..., : array.shape[-1] - 1] if array.ndim else array.reshape(1)
        elif kind == 8:
            tensors[name] = array[:0] if array.ndim else array.reshape(1, 1)
        else:
            tensors[name] = array.view(np.uint8) if array.ndim else array.astype(np.float64)
    return tensors


@each_program
def test_no_contents_lead_outside_of_the_arrays(built, tmp_path, name):
    rng = random.Random(zlib.crc32(name.encode()))
    sources = [path for path in FILES[name] if path.stat().st_size < 100_000]
    paths = []
    for n in range(120):
        paths.append(tmp_path / f"{n}.kdtr")
        kdtr.write(paths[-1], mutant(kdtr.read(sources[n % len(sources)]), rng))
    code, lines = built.run(f"check_{name}", *paths, kind="sanitized")
    assert code == 1 and len(lines) == len(paths)
    refused = sum(" has another " in line or " is uint8, not " in line for line in lines)
    assert refused > 5
    assert len(lines) - refused > 40, "most files must come to the implementation"


def test_the_sanitizers_see_a_link_that_is_followed_outside(built, tmp_path):
    source = (NATIVE / "accept.cpp").read_text(encoding="utf-8")
    check_of_links = "broken = !(last < link && link < count);"
    assert source.count(check_of_links) == 1
    careless = source.replace(check_of_links, "broken = !(last < link) && link < count;")
    executable = built.with_implementation(tmp_path / "careless", "accept", careless, *SANITIZERS)
    with pytest.raises(AssertionError, match="AddressSanitizer"):
        run(executable, "check_accept", GREEDY)


def wild_walks(rng: random.Random) -> list[dict[str, np.ndarray]]:
    """Both greedy walks over links, numbers of nodes and targets at random, with the oracle's results."""
    batch, num_nodes, width = 6, rng.randint(1, 12), rng.randint(1, 7)

    def drawn(values: Callable[[], int], *shape: int, dtype: Any = np.int32) -> np.ndarray:
        return np.array([values() for _ in range(math.prod(shape))], dtype=dtype).reshape(shape)

    def links() -> np.ndarray:
        anywhere = [2**31 - 1, -(2**31), *range(-3, num_nodes + 3)]
        forward = drawn(lambda: rng.randint(1, 3), batch, num_nodes) + np.arange(num_nodes, dtype=np.int32)
        tenths = drawn(lambda: rng.randrange(10), batch, num_nodes)
        wild = drawn(lambda: rng.choice(anywhere), batch, num_nodes)
        return np.where(tenths == 0, wild, np.where(tenths <= 2, -1, forward)).astype(np.int32)

    tree = {
        "tokens": drawn(lambda: rng.randrange(2), batch, num_nodes),
        "first_child": links(),
        "next_sibling": links(),
        "num_nodes": drawn(lambda: rng.choice([num_nodes, num_nodes, rng.randint(-1, num_nodes + 2)]), batch),
        "max_depth": np.array(width - 1, np.int32),
    }
    targets = drawn(lambda: rng.choice([0, 0, 0, 1, 1, 1, 2, -1]), batch, num_nodes, dtype=np.int64)
    stops = drawn(lambda: rng.choice([-1, 2]), 2)
    greedy = {"operator": np.frombuffer(b"accept_greedy", np.uint8), **tree}
    greedy |= {"target_tokens": targets, "stop_tokens": stops}
    greedy |= {f"accepted.{name}": array for name, array in accept.accept_greedy(tree, targets, stops).items()}

    places = batch * num_nodes
    given = {
        "predicts": np.full(places, -9, np.int32),
        "accept_index": np.full((batch, width), -9, np.int32),
        "accept_token_num": np.full(batch, -9, np.int32),
        "candidates": tree["tokens"],
        "retrive_index": drawn(lambda: rng.randrange(-1, places + 1), batch, num_nodes),
        "retrive_next_token": tree["first_child"],
        "retrive_next_sibling": tree["next_sibling"],
        "target_predict": drawn(lambda: rng.randrange(2), batch, num_nodes),
    }
    after = dict(zip(given, accept.verify_tree_greedy(**given), strict=False))
    sglang = {"operator": np.frombuffer(b"verify_tree_greedy", np.uint8), **given}
    return [greedy, sglang | {f"accepted.{name}": array for name, array in after.items()}]


def test_walks_over_wild_links_are_the_oracles(built, tmp_path):
    rng = random.Random(5)
    files = [tensors for _ in range(40) for tensors in wild_walks(rng)]
    flags = np.concatenate([tensors["accepted.flags"] for tensors in files[::2]])
    lengths = np.concatenate([tensors["accepted.num_accepted"] for tensors in files[::2]])
    assert (flags & 2).any() and (flags == 0).any() and lengths.max() >= 4, "the links must be wild, and not too wild"
    paths = [tmp_path / f"{n}.kdtr" for n in range(len(files))]
    for path, tensors in zip(paths, files, strict=True):
        kdtr.write(path, tensors)
    code, lines = built.run("check_accept", *paths, kind="sanitized")
    assert [line for line in lines if not line.endswith("  ok")] == []
    assert code == 0 and len(lines) == len(files)


# The listing


def listed(path: Path) -> list[str]:
    """What kdtr_list prints of a file."""
    lines = [str(path)]
    for name, array in kdtr.read(path).items():
        with np.errstate(invalid="ignore"):  # a signalling NaN
            values = array.astype(np.float64).reshape(-1)
        finite = values[np.isfinite(values)]
        line = f"  {name}  {array.dtype.name}  {list(array.shape)}  crc {zlib.crc32(array.tobytes()):08x}"
        if finite.size:
            # Adding up one after the other is what np.sum does not do.
            total = np.cumsum(finite)[-1] + 0.0
            line += f"  min {finite.min() + 0.0:.17g}  max {finite.max() + 0.0:.17g}  sum {total:.17g}"
        if finite.size < values.size:
            line += f"  finite {finite.size} of {values.size}"
        lines.append(line)
    return lines


def test_both_languages_list_every_file_alike(built):
    code, lines = built.run("kdtr_list", *EVERY_FILE)
    assert code == 0
    assert lines == [line for path in EVERY_FILE for line in listed(path)]


def test_the_listing_of_every_dtype_and_of_odd_values(built, tmp_path):
    bits = np.arange(2**16, dtype=np.uint16)
    tensors = {
        "every float16": bits.view(np.float16),
        "every bfloat16": bits.view(ml_dtypes.bfloat16),
        "no finite one": np.array([np.nan, np.inf, -np.inf], np.float32),
        "empty": np.zeros((3, 0), np.int32),
        "zeros": np.array([-0.0, 0.0, -0.0]),
        "scalar": np.float64(0.1),
        "bools": np.array([True, False, True]),
        **{
            name: np.array([np.iinfo(name).min, np.iinfo(name).max, 1], name)
            for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
        },
    }
    path = tmp_path / "odd.kdtr"
    kdtr.write(path, tensors)
    for kind in ("plain", "sanitized"):
        assert built.run("kdtr_list", path, kind=kind) == (0, listed(path))


def test_the_listing_names_what_it_cannot_read(built, tmp_path):
    (tmp_path / "bad.kdtr").write_bytes(b"x")
    code, lines = built.run("kdtr_list", tmp_path / "bad.kdtr", MERGE)
    assert code == 1 and lines[0].endswith("is not a KDTR file") and lines[1:] == listed(MERGE)
    assert built.run("kdtr_list") == (2, [])


# The page and the comments


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder in which the commands of the page can run, as in the root of a checkout, without leaving files there."""
    for name in ("ddtree_numba", "refs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_the_commands_of_the_page_print_what_it_says(built, checkout):
    compile_and_check, save, list_one = blocks("bash")
    printed = [block for block in blocks("text") if not block.startswith("FAIL ")]
    shell = ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run([*shell, compile_and_check + save], cwd=checkout, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == 2 * printed[0]
    assert {path.name for path in (checkout / "results").iterdir()} == {path.name for path in FILES["merge_states"]}
    # The program that the last command compiles is there already.
    compiling, listing = list_one.splitlines()
    assert compiling == "g++ -std=c++17 -O2 -I ddtree_numba/include refs/native/kdtr_list.cpp -o kdtr_list"
    (checkout / "kdtr_list").write_text(f'#!/bin/sh\nexec "{built.folder}/plain" kdtr_list "$@"\n')
    (checkout / "kdtr_list").chmod(0o755)
    done = subprocess.run([*shell, listing], cwd=checkout, capture_output=True, text=True, timeout=60)
    assert done.stdout == printed[1] and len(printed) == 2


def test_the_example_of_a_failure_is_one():
    (example,) = [block for block in blocks("text") if block.startswith("FAIL ")]
    assert example.strip() in [verdict for *_, verdict in WRONG], "test_a_wrong_implementation_fails holds it true"


def test_the_table_of_programs_is_what_is_there():
    rows = re.findall(
        r"^\| `check_(\w+)\.cpp` \| \[(\w+)\.hpp\]\(.*\) \| .* \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M
    )
    assert {name: tuple(re.findall(r"`(\w+)`", files)) for name, _, files in rows} == PATTERNS
    assert all(name == header for name, header, _ in rows)
    assert {path.name for path in NATIVE.glob("check_*.cpp")} == {f"check_{name}.cpp" for name in PATTERNS}


@each_program
def test_the_commands_in_the_comments_name_the_right_files(name):
    text = (NATIVE / f"check_{name}.cpp").read_text(encoding="utf-8")
    compiling, checking = re.findall(r"^//     (.*)$", text, re.M)
    words = bash_words(compiling)
    assert words[:5] == ["g++", "-std=c++17", "-O2", "-I", "../../ddtree_numba/include"]
    assert words[5:] == [f"check_{name}.cpp", f"{name}.cpp", "-o", f"check_{name}"]
    assert (NATIVE / words[4] / "kdtr.hpp").exists()
    program, *files = bash_words(checking)
    assert program == f"./check_{name}"
    assert sorted((NATIVE / file).resolve() for file in files) == sorted(
        path for path in FILES[name] if path.parent == REFS
    )
    # Each stands on its own: all_programs would hide an include that is missing.
    assert re.findall(r'^#include "(.*)"$', text, re.M) in ([f"{name}.hpp", "check.hpp"], ["check.hpp", f"{name}.hpp"])


def bash_words(command: str) -> list[str]:
    """The words of a command, as bash expands them in the folder of the sources."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], cwd=NATIVE, capture_output=True, text=True)
    return done.stdout.splitlines()
