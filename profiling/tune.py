"""Find the fastest tiles, grids and crossovers on this GPU, for ``variant="auto"`` to read.

``python profiling/tune.py`` measures one configuration after the other, prints tables, draws a heat map, and writes
what it chose for this GPU to the small JSON file that `ddtree_numba.attention.tuned` describes. Swept are

- flash, where there is much to do and where there is little: the tiles (rows x keys x warps) and the waves of the grid;
- three_phase beside flash with few keys: up to how many of them three_phase is the faster one;
- merge_states: threads a block and lanes a row. It has no ``variant="auto"``, so these are printed and no more.

Each configuration is checked against float64 first, and what is wrong is not timed and never chosen. One that does not
compile or does not fit costs only its own row; registers and local memory (spills) are columns. Another one is chosen
instead of the built-in one only where it is faster by more than `SHARE`.

The CSV, tune.csv in the folder ``--out``, is written after each configuration, whole or not at all. A second start goes
on behind what it holds of the same GPU and commit; ``--again`` starts anew. ``--quick`` sweeps a few configurations, to
tune_quick.csv, and writes what it chose beside it, where nobody reads it unasked.

The exit code is 1 if there is nothing right to choose from, 2 if nothing can be measured here. Needs PyTorch and
nvidia-ml-py, and matplotlib for the heat map.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

import bench_merge_states
import bench_verify_attention as attention
import harness
from harness import MACHINE, Row, measured, spoil
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tables import read_rows, write_rows

import ddtree_numba as dd
from ddtree_numba.attention import flash, merge, remembered, tuned, verify
from ddtree_numba.attention.flash import LARGE, SMALL, Tiles, Tuned
from ddtree_numba.check import LSE_BOUND
from ddtree_numba.device import launch, runtime

SHARE = 0.03  # two measurements of the same code agree to this

TILES = (
    LARGE,
    SMALL,
    Tiles(rows=32, keys=32, warps=8, score_rows=8, score_keys=4, value_rows=8, max_rank=1024, blocks=1),
    Tiles(rows=64, keys=16, warps=8, score_rows=8, score_keys=4, value_rows=8, max_rank=512, blocks=1),
    Tiles(rows=32, keys=16, warps=4, score_rows=8, score_keys=4, value_rows=8, max_rank=512, blocks=2),
    Tiles(rows=32, keys=16, warps=8, score_rows=4, score_keys=4, value_rows=8, max_rank=1024, blocks=2),
    Tiles(rows=16, keys=32, warps=8, score_rows=4, score_keys=4, value_rows=4, max_rank=1024, blocks=2),
    Tiles(rows=64, keys=32, warps=16, score_rows=8, score_keys=4, value_rows=8, max_rank=1024, blocks=1),
)
WAVES = (1, 2, 4)
MUCH, LITTLE, FEW, MERGE = "much", "little", "few keys", "merge_states"  # what is swept
# B, H, Q, prefix. The dtypes stand one after the other, so that the last compiled kernel is the one that ran.
SHAPES = {MUCH: (8, 64, 9, 2048), LITTLE: (1, 64, 9, 1024)}
DTYPES = ("float32", "bfloat16")
FEW_KEYS = (8, 16, 24, 32, 40, 48, 64, 96, 128, 256)
FEW_SHAPE = {"H": 64, "Q": 5}
FEW_BATCHES = (1, 8)
MERGE_SHAPES = ((288, 64, 512), (9, 64, 512))
THREADS = (64, 128, 256)
LOG_LANES = tuple(range(merge.MAX_LOG_LANES + 1))

SETTINGS = ("sweep", "B", "H", "Q", "prefix", "R", "dtype", "variant", "tiles", "waves", "threads", "lanes")
FIELDS = (
    *(*SETTINGS, "right", "rel_frobenius", "bound", "microseconds", "spread_microseconds", "registers", "local_bytes"),
    *("repeats", "note", *MACHINE),
)


def name_of(tiles: Tiles) -> str:
    """Rows, keys and warps, which tell all tiles here apart."""
    return f"{tiles.rows}x{tiles.keys}x{tiles.warps}"


def tiles_of(name: str) -> Tiles:
    """The tiles of a name."""
    return next(x for x in (*TILES, *flash.TILES) if name_of(x) == name)


class Gpu(attention.Gpu):
    """All that needs PyTorch and a GPU. Tests put NumPy in its place."""

    def used(self, kernel: Any) -> Row:
        """Registers and bytes of local memory of a thread, of the kernel that was compiled last."""
        (*_, last) = kernel.overloads.values()
        return {"registers": last.regs_per_thread, "local_bytes": last.local_mem_per_thread}


def time_alone(gpu: Any, call: Callable[[], Any]) -> dict[str, str]:
    """Device time of a call from a flushed L2, and no other: these are many configurations."""
    median, spread = gpu.alone(call)
    return {"microseconds": f"{median:.2f}", "spread_microseconds": f"{spread:.2f}"}


# What is measured


def flash_settings(quick: bool) -> Iterator[Row]:
    """Tiles and waves, where there is much to do and where there is little."""
    for dtype in DTYPES[:1] if quick else DTYPES:
        for tiles in TILES[:3] if quick else TILES:
            for sweep, shape in SHAPES.items():
                for waves in WAVES[:2] if quick else WAVES:
                    row = {"sweep": sweep, **dict(zip(("B", "H", "Q", "prefix"), shape, strict=True)), "dtype": dtype}
                    yield {**row, "variant": "flash", "tiles": name_of(tiles), "waves": waves}


def crossover_settings(choice: Tuned, quick: bool) -> Iterator[Row]:
    """three_phase and flash, as it was chosen for little work, from few keys to more."""
    for keys in FEW_KEYS[1::2] if quick else FEW_KEYS:
        for batch in FEW_BATCHES:
            row = {"sweep": FEW, "B": batch, **FEW_SHAPE, "prefix": keys - FEW_SHAPE["Q"], "dtype": "float32"}
            yield {**row, "variant": "three_phase"}
            yield {**row, "variant": "flash", "tiles": name_of(choice.small), "waves": choice.small_waves}


def merge_settings(quick: bool) -> Iterator[Row]:
    """Threads a block and lanes a row."""
    for shape in MERGE_SHAPES:
        for threads in (merge.THREADS,) if quick or runtime.SIMULATOR else THREADS:
            for log_lanes in LOG_LANES:
                row = {"sweep": MERGE, "B": shape[0], "H": shape[1], "R": shape[2], "dtype": "float32"}
                yield {**row, "variant": "merge_states", "threads": threads, "lanes": 1 << log_lanes}


def number_of_jobs(quick: bool) -> int:
    """How many there are, for the progress bar."""
    crossovers = crossover_settings(built_in(), quick)
    return sum(1 for settings in (flash_settings(quick), crossovers, merge_settings(quick)) for _ in settings)


def jobs(gpus: Any, rows: list[Row], quick: bool) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """What is set, and what measures it. ``rows`` grows meanwhile: the crossover takes what was chosen before it."""
    gpu, merges = gpus
    for row in flash_settings(quick):
        yield row, lambda row=row: attention_row(gpu, row)
    for row in crossover_settings(chosen(rows), quick):
        yield row, lambda row=row: attention_row(gpu, row)
    for row in merge_settings(quick):
        yield row, lambda row=row: merge_row(merges, row)


# How it is measured


@functools.lru_cache(maxsize=2)
def problem(gpu: Any, shape: tuple[int, int, int, int], dtype: str) -> tuple[Any, Any, Any, float]:
    """Inputs, arrays for the results, the exact results, and the bound on the error of flash."""
    inputs = gpu.inputs(attention.Case(shape, dtype))
    exact = gpu.exact(inputs, dd.KIMI_K2_SM_SCALE)
    return inputs, gpu.results(inputs), exact, attention.bounds(gpu, exact, dtype, shape[3] + shape[2])


@contextmanager
def choosing(choice: Tuned | None) -> Iterator[None]:
    """``variant="auto"`` takes flash as it would from the file, and no tensor cores, meanwhile."""
    kept = tuned.of, verify.likely
    tuned.of, verify.likely = lambda device: choice, lambda *sizes, **options: ("flash",)
    remembered.forget()  # a call with the same arrays would launch what it did before
    try:
        yield
    finally:
        tuned.of, verify.likely = kept
        remembered.forget()


def attention_row(gpu: Any, row: Row) -> Row:
    """A row of verify_attention: its error first, then, if it is within its bound, its time."""
    shape, variant = tuple(row[name] for name in ("B", "H", "Q", "prefix")), row["variant"]
    choice, way = None, variant
    if variant == "flash":
        tiles, waves, way = tiles_of(row["tiles"]), row["waves"], "auto"
        choice = Tuned(0, tiles, waves, tiles, waves)
    noted: Row = {}

    def call() -> Any:
        inputs, results, _, _ = problem(gpu, shape, row["dtype"])
        given = {"sm_scale": dd.KIMI_K2_SM_SCALE, "kv_lora_rank": attention.KV_LORA_RANK, "variant": way}
        return dd.verify_attention(**inputs, **results, **given)

    def right() -> bool:
        if choice is not None and not flash.fits(choice.large, attention.KV_LORA_RANK, attention.HEAD_DIM, -1):
            raise ValueError("these tiles do not fit this GPU's shared memory")
        _, results, exact, bounds = problem(gpu, shape, row["dtype"])
        spoil(*results.values())
        errors = gpu.errors(call(), exact[:2])
        noted.update(rel_frobenius=f"{errors['rel_frobenius']:.3e}", bound=f"{bounds[variant]:.3e}")
        if choice is not None and row["sweep"] != FEW:
            wide = flash.Shape(choice.large, attention.KV_LORA_RANK, attention.HEAD_DIM, 1)
            noted.update(gpu.used(flash.make_kernel(wide)))
        return errors["rel_frobenius"] <= bounds[variant] and errors["lse_error"] <= LSE_BOUND

    with choosing(choice):
        return {**measured(row, gpu, right, call, functools.partial(time_alone, gpu)), **noted}


@functools.cache
def merge_kernel(threads: int) -> Any:
    """The kernel of merge_states for blocks of so many threads; it reads their number when it is compiled."""
    if threads == merge.THREADS:
        return merge.kernel
    most = merge.LAUNCH_BOUNDS[0] * merge.LAUNCH_BOUNDS[1]  # threads a multiprocessor must hold
    return launch.jit(launch_bounds=(threads, most // threads))(merge.kernel.py_func)


@contextmanager
def merging(threads: int, lanes: int) -> Iterator[None]:
    """merge_states has so many threads a block, and so many lanes a row at most, meanwhile."""
    names = ("kernel", "THREADS", "MAX_LOG_LANES")
    kept = [getattr(merge, name) for name in names]
    for name, value in zip(names, (merge_kernel(threads), threads, lanes.bit_length() - 1), strict=True):
        setattr(merge, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, kept, strict=True):
            setattr(merge, name, value)


def merge_row(gpu: Any, row: Row) -> Row:
    """A row of merge_states: checked first, then timed."""
    shape, dtype = (row["B"], row["H"], row["R"]), row["dtype"]
    states = gpu.states(shape, dtype, "C order")
    results = gpu.results(states)

    def call() -> Any:
        return dd.merge_states(*states, out=results[0], lse=results[1])

    def right() -> bool:
        spoil(*results)
        return gpu.right(call(), states, dtype, bench_merge_states.BOUNDS["merge_states"])

    with merging(row["threads"], row["lanes"]):
        return measured(row, gpu, right, call, functools.partial(time_alone, gpu))


# What is chosen


def key(row: Row) -> tuple[str, ...]:
    """What was set."""
    return tuple(str(row.get(name, "")) for name in SETTINGS)


def is_right(row: Row) -> bool:
    """Of a row that was measured here or read from a file."""
    return str(row.get("right")) == "True"


def mean(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / len(values))


def times(rows: Iterable[Row], sweep: str, *names: str) -> dict[tuple[str, ...], dict[tuple[str, ...], float]]:
    """Microseconds of what was right, by these columns, and then by the case: all other settings."""
    found: dict[tuple[str, ...], dict[tuple[str, ...], float]] = {}
    for row in rows:
        if row["sweep"] == sweep and is_right(row):
            case = tuple(str(row.get(name, "")) for name in SETTINGS if name not in names)
            one = tuple(str(row.get(name, "")) for name in names)
            found.setdefault(one, {})[case] = float(row["microseconds"])
    return found


def fastest(rows: Iterable[Row], sweep: str, names: Sequence[str], usual: tuple[str, ...]) -> tuple[str, ...] | None:
    """The values of these columns with the least time over all cases, or the usual ones where these are as good.

    What was not right in every case does not count; None if nothing was.
    """
    found = times(rows, sweep, *names)
    most = max((len(of) for of in found.values()), default=0)
    means = {one: mean(list(of.values())) for one, of in found.items() if len(of) == most}
    if not means:
        return None
    best = min(means, key=lambda one: means[one])
    return usual if usual in means and means[usual] <= (1 + SHARE) * means[best] else best


def built_in() -> Tuned:
    """What is chosen without a file."""
    fitting = flash.fitting_tiles(attention.KV_LORA_RANK, attention.HEAD_DIM, -1) or [SMALL]
    return Tuned(verify.FEW_KEYS, fitting[0], 1, fitting[-1], 1)


def chosen(rows: list[Row]) -> Tuned:
    """The choice by these rows; what they do not decide is the built-in one."""
    choice = built_in()
    found = {}
    for sweep, tiles in ((MUCH, choice.large), (LITTLE, choice.small)):
        name, waves = fastest(rows, sweep, ("tiles", "waves"), (name_of(tiles), "1")) or (name_of(tiles), "1")
        found[sweep] = tiles_of(name), int(waves)
    few = few_keys(rows)
    return Tuned(choice.few_keys if few is None else few, *found[MUCH], *found[LITTLE])


def ratios(rows: list[Row]) -> dict[int, list[float]]:
    """Time of three_phase over that of flash, by keys, rising: one ratio a batch size."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["sweep"] == FEW and is_right(row):
            case = str(int(row["prefix"]) + int(row["Q"])), str(row["B"])
            found.setdefault(case, {})[row["variant"]] = float(row["microseconds"])
    by_keys: dict[int, list[float]] = {}
    for (keys, _), one in sorted(found.items(), key=lambda item: tuple(map(int, item[0]))):
        if len(one) == 2:
            by_keys.setdefault(int(keys), []).append(one["three_phase"] / one["flash"])
    return by_keys


def few_keys(rows: list[Row]) -> int | None:
    """The most keys up to which three_phase is the faster one; None where there is nothing to tell from."""
    found = ratios(rows)
    last = 0
    for keys, values in found.items():
        if mean(values) >= 1:
            break
        last = keys
    return last if found else None


# What is shown


def line(row: Row) -> str:
    """A row for people."""

    def shown(*names: str) -> dict[str, str]:
        return {name: str(row[name]) for name in names if row.get(name, "") != ""}

    sizes = ",".join(shown("B", "H", "Q", "prefix", "R").values())
    setting = " ".join(f"{name}={value}" for name, value in shown("tiles", "waves", "threads", "lanes").items())
    text = f"{row['sweep']:13}{sizes:14} {row['dtype']:9}{row['variant']:13}{setting:26}"
    text += f"{row.get('microseconds', '-'):>9}"
    if str(row.get("local_bytes") or 0) != "0":
        text += f"  {row['local_bytes']} bytes of local memory a thread"
    return f"{text} {row.get('note', '')}{'' if is_right(row) else '  NOT RIGHT'}"


def print_tables(rows: list[Row], choice: Tuned) -> None:
    """Microseconds of each sweep, the fastest of each case marked."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for sweep, names in ((MUCH, ("tiles", "waves")), (LITTLE, ("tiles", "waves")), (MERGE, ("threads", "lanes"))):
        found = times(rows, sweep, *names)
        cases = list(dict.fromkeys(case for of in found.values() for case in of))
        table = Table(*names, *(title_of(case) for case in cases), title=f"{sweep}: microseconds")
        for one, of in found.items():
            best = {case: min(other[case] for other in found.values() if case in other) for case in of}
            table.add_row(*one, *(f"{of[c]:.1f}{' *' if of[c] == best[c] else ''}" if c in of else "-" for c in cases))
        if found:
            console.print(table)
    table = Table("keys", "three_phase / flash", title=f"{FEW}: three_phase up to {choice.few_keys}")
    for keys, values in ratios(rows).items():
        table.add_row(str(keys), " ".join(f"{value:.2f}" for value in values))
    console.print(table)


def title_of(case: tuple[str, ...]) -> str:
    """A case for people: its sizes and dtype."""
    *sizes, dtype = [value for value in case[1:] if value and value not in ("flash", "merge_states")]
    return f"{','.join(sizes)} {dtype}"


def draw(theme: Any, rows: list[Row]) -> Any:
    """Heat maps: time over that of the fastest configuration, a panel a case; and three_phase over flash."""
    import style

    maps: list[tuple[str, list[str], list[str], dict[tuple[str, str], tuple[float, str]]]] = []
    for sweep, names in ((MUCH, ("tiles", "waves")), (LITTLE, ("tiles", "waves")), (MERGE, ("threads", "lanes"))):
        found = times(rows, sweep, *names)
        for case in dict.fromkeys(case for of in found.values() for case in of):
            values = {one: of[case] for one, of in found.items() if case in of}
            best = min(values.values())
            cells = {one: (value / best, f"{value:.4g}") for one, value in values.items()}
            down, across = (list(dict.fromkeys(one[n] for one in cells)) for n in (0, 1))
            maps.append((f"{sweep}: {title_of(case)}, µs; {names[0]} by {names[1]}", down, across, cells))
    crossing = ratios(rows)
    if crossing:
        widest = max(map(len, crossing.values()))
        batches = [f"B {batch}" for batch in FEW_BATCHES[:widest]]
        cells = {
            (batch, str(keys)): (value, f"{value:.2f}")
            for keys, values in crossing.items()
            for batch, value in zip(batches, values, strict=False)
        }
        maps.append(("time of three_phase over that of flash, by keys", batches, [str(k) for k in crossing], cells))
    if not maps:
        return None
    lines = -(-len(maps) // 2)
    figure, every = style.panels(theme, lines, 2, 0.9 + 2.1 * lines)
    for axes, one in zip(every.flat, maps, strict=False):
        draw_map(axes, theme, *one)
    for axes in every.flat[len(maps) :]:
        axes.set_axis_off()
    style.headline(figure, theme, "Configurations: the fainter, the faster", style.gpu_of(rows))
    style.margins(figure, left=0.75, top=0.75, bottom=0.3, across=0.8, down=0.6)
    return figure


def draw_map(
    axes: Any, theme: Any, name: str, down: list[str], across: list[str], cells: dict[tuple[str, str], Any]
) -> None:
    """One panel: a square a configuration, with its number; black once it takes twice the least."""
    import style
    from matplotlib.colors import to_rgb

    axes.grid(False)
    pale, strong = (to_rgb(x) for x in (theme.page, theme.blue))
    for (row, column), (ratio, text) in cells.items():
        share = min(max(ratio - 1, 0.0), 1.0)
        colour = tuple(a + (b - a) * share for a, b in zip(pale, strong, strict=True))
        x, y = across.index(column), down.index(row)
        axes.add_patch(plot_square(x, y, colour, theme.faint))
        light = sum(w * c for w, c in zip((0.3, 0.59, 0.11), colour, strict=True)) > 0.5
        label = axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color="#000000" if light else "#ffffff")
        label.set_gid(f"cell-{name.split(':')[0].replace(' ', '-')}-{row}-{column}".replace(" ", "-"))
    axes.set_xlim(-0.5, len(across) - 0.5)
    axes.set_ylim(len(down) - 0.5, -0.5)
    axes.set_xticks(range(len(across)), across)
    axes.set_yticks(range(len(down)), down)
    style.title(axes, theme, name)


def plot_square(x: int, y: int, colour: Any, edge: Any) -> Any:
    """A unit square around a point."""
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor=edge, lw=0.8)


def draw_files(out: Path) -> str:
    """The heat map from the CSV of a folder, light and dark; says what was drawn, or why nothing was."""
    try:
        import style
    except ImportError as error:
        return f"no heat map: {error}; pip install matplotlib"
    names = style.draw_files([style.Drawing("tune", ("tune",), draw, "configurations and their times")], out, out)
    return f"{out}/tune_{{light,dark}}.{{svg,png}}" if names else "no heat map: there is nothing right to draw"


# The whole


def earlier(path: Path, machine: Row) -> list[Row]:
    """The rows of an earlier start that hold: of this GPU and commit, and without an exception."""
    return [
        row
        for row in read_rows(path)
        if not row["note"] and all(row[name] == str(machine[name]) for name in ("gpu", "commit"))
    ]


def sweep(gpus: Any, path: Path, again: bool, quick: bool) -> list[Row]:
    """Measure what the file does not hold, and keep it there."""
    if not again:
        harness.require_columns(path, FIELDS)
    rows = [] if again else earlier(path, gpus[0].machine())
    done = {key(row) for row in rows}
    if rows:
        print(f"{len(rows)} configurations of {path} are not measured again")
    every = track(
        jobs(gpus, rows, quick), "tuning", total=number_of_jobs(quick), console=Console(stderr=True)
    )  # fmt: skip
    for row, measure in every:
        if key(row) not in done:
            rows.append(measure())
            print(line(rows[-1]), flush=True)
            write_rows(path, rows, FIELDS)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, draw, write; 1 if there was nothing right to choose from, 2 if nothing can be measured here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    local = harness.ROOT / "profiling" / "results" / "local"
    parser.add_argument("--out", type=Path, default=local, help="folder for CSV and heat map")
    parser.add_argument("--file", type=Path, help="JSON file for the choice; default: the one that auto reads")
    parser.add_argument("--commit", help="commit that is measured; default: what git says")
    parser.add_argument("--quick", action="store_true", help="a few configurations, to see that it runs")
    parser.add_argument("--again", action="store_true", help="start anew, whatever an earlier start has measured")
    options = parser.parse_args(arguments)
    file = options.file or (options.out / "tuned_quick.json" if options.quick else tuned.path())
    path = options.out / f"tune{'_quick' if options.quick else ''}.csv"
    try:
        if file is None:
            raise ValueError(f"{tuned.VARIABLE} is empty, so there is no file that auto reads; name one by --file")
        if file.exists():
            tuned.read(file)  # better now than at the end
        gpus = [
            harness.open_gpu(of, options.commit, options.quick, 0.0) for of in (Gpu, bench_merge_states.Gpu)
        ]  # fmt: skip
        rows = sweep(gpus, path, options.again, options.quick)
    except KeyboardInterrupt:
        print(f"{path} holds what was measured; another start goes on behind it", file=sys.stderr)
        return 130
    except tuned.Unusable as error:
        print(f"{file} is none of these files and is not overwritten: {error}", file=sys.stderr)
        return 2
    except (ImportError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    choice = chosen(rows)
    print_tables(rows, choice)
    print(draw_files(options.out))
    if not times(rows, MUCH, "tiles") or not times(rows, LITTLE, "tiles"):
        print("no tiles of flash were right, so nothing was chosen", file=sys.stderr)
        return 1
    best = fastest(rows, MERGE, ("threads", "lanes"), (str(merge.THREADS), str(1 << merge.MAX_LOG_LANES)))
    if best is not None:
        print(f"merge_states: {best[0]} threads and up to {best[1]} lanes a row; its own are THREADS and MAX_LOG_LANES")
    tuned.write(file, launch.device_name(-1), choice)
    print(f"flash, much to do: tiles {name_of(choice.large)}, grid of {choice.large_waves} times what the GPU holds")
    print(f"flash, little to do: tiles {name_of(choice.small)}, grid of {choice.small_waves} times what the GPU holds")
    print(f"three_phase up to {choice.few_keys} keys")
    how = "" if file == tuned.path() else f", once {tuned.VARIABLE} names it"
    print(f'{file}: variant="auto" takes this on {launch.device_name(-1)}{how}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
