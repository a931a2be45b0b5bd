"""What `profiling/tune.py` found fastest on a GPU, for ``variant="auto"``: a small JSON file, read once a process.

::

    {"format": "ddtree_numba tuned 1",
     "gpus": {"NVIDIA H200": {"few_keys": 32,
                              "large": {"rows": 64, "keys": 32, ..., "blocks": 1, "waves": 1},
                              "small": {"rows": 16, "keys": 16, ..., "blocks": 2, "waves": 1}}}}

The fields of ``large`` and ``small`` are those of `flash.Tiles`; the grid has ``waves`` times as many blocks as the GPU
holds at a time. The file is ``tuned.json`` in the user's cache folder for this package, or what the variable `VARIABLE`
names; where that is empty, none is read. A GPU that it does not name, or no file at all, means the built-in choice, and
so does a file that is not as it must be, which a warning says once.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from ddtree_numba.attention.flash import Tiles, Tuned, unfit
from ddtree_numba.device.cache import cache_folder
from ddtree_numba.device.launch import device_name

VARIABLE = "DDTREE_NUMBA_TUNED"
FORMAT = "ddtree_numba tuned 1"
MOST_KEYS = 1024  # of few_keys: three_phase keeps a row of scores in shared memory
MOST_WAVES = 16
MOST_BYTES = 1 << 20


class Unusable(ValueError):
    """A file is not what `write` makes; the message says why."""


def path() -> Path | None:
    """Where the file is, or would be; None where there is to be none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    return cache_folder() / "tuned.json"


def of(device: int) -> Tuned | None:
    """What was found for a GPU; -1 means the current one. None: the built-in choice."""
    return of_name(device_name(device))


@functools.cache  # so that a workspace made for one call does for the next, whatever becomes of the file
def of_name(gpu: str) -> Tuned | None:
    """What the file says of a GPU of this name."""
    file = path()
    try:
        return None if file is None else read(file).get(gpu)
    except FileNotFoundError:
        if VARIABLE not in os.environ:
            return None
        reason = "there is no such file"
    except (OSError, Unusable) as error:
        reason = str(error)
    logging.getLogger("ddtree_numba").warning(
        "ddtree_numba: %s is not used, and the built-in choice of tiles is: %s", file, reason
    )
    return None


def read(file: Path) -> dict[str, Tuned]:
    """What a file says, by the names of GPUs.

    Raises
    ------
    OSError
        It cannot be read.
    Unusable
        It is not as it must be.
    """
    with open(file, "rb") as opened:
        text = opened.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise Unusable(f"it has more than {MOST_BYTES} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"it is no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("gpus"), dict):
        raise Unusable(f'it does not say "format": "{FORMAT}" and "gpus": {{...}}')
    return {gpu: one_gpu(f"gpus[{gpu!r}]", entry) for gpu, entry in found["gpus"].items()}


def one_gpu(where: str, entry: Any) -> Tuned:
    """The entry of one GPU, checked."""
    fields = fields_of(where, entry, ("few_keys", "large", "small"))
    few_keys = whole(f"{where}.few_keys", fields["few_keys"], 0, MOST_KEYS)
    large, large_waves = one_size(f"{where}.large", fields["large"])
    small, small_waves = one_size(f"{where}.small", fields["small"])
    return Tuned(few_keys, large, large_waves, small, small_waves)


def one_size(where: str, entry: Any) -> tuple[Tiles, int]:
    """Tiles that a kernel can have, and waves."""
    fields = fields_of(where, entry, (*Tiles._fields, "waves"))
    tiles = Tiles(*(whole(f"{where}.{name}", fields[name], 1, 4096) for name in Tiles._fields))
    if unfit(tiles):
        raise Unusable(f"{where} is {tiles._asdict()}; it must keep the rule: {unfit(tiles)}")
    return tiles, whole(f"{where}.waves", fields["waves"], 1, MOST_WAVES)


def fields_of(where: str, entry: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """An object with these fields and no others."""
    if not isinstance(entry, dict) or sorted(entry) != sorted(names):
        raise Unusable(f"{where} must have the fields {', '.join(names)} and no others")
    return entry


def whole(where: str, value: Any, least: int, most: int) -> int:
    """A whole number within bounds."""
    if type(value) is not int or not least <= value <= most:
        raise Unusable(f"{where} is {value!r}; it must be a whole number from {least} to {most}")
    return value


def write(file: Path, gpu: str, found: Tuned) -> None:
    """Put a GPU's entry into a file, whole or not at all; what it says of other GPUs stays.

    Raises
    ------
    OSError
        It cannot be read or written.
    Unusable
        A file is there that is not as it must be: it is not overwritten.
    """
    gpus = {**(read(file) if file.exists() else {}), gpu: found}
    entries = {
        name: {
            "few_keys": one.few_keys,
            "large": {**one.large._asdict(), "waves": one.large_waves},
            "small": {**one.small._asdict(), "waves": one.small_waves},
        }
        for name, one in gpus.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as opened:
        json.dump({"format": FORMAT, "gpus": entries}, opened, indent=1)
        opened.write("\n")
    os.chmod(opened.name, 0o644)
    os.replace(opened.name, file)
