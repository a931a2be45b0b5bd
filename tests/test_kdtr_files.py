"""KDTR and the file system, in both languages: kills, races, full disks, and paths that are no ordinary files."""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba import kdtr

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals, pipes and permissions")

# Both programs know the same words. A file holds "x", `count` float64 numbers, all of them `value`.
#     write VALUE COUNT PATH...     once; a line for each
#     loop VALUE COUNT PATH         until somebody ends it; "started" when the first file is there
#     read PATH...                  a line for each
PYTHON = r"""
import sys
sys.path.insert(0, sys.argv.pop(1))  # the module by itself, which starts sooner than the package
import numpy as np
import kdtr

def attempt(action):
    try:
        print(action(), flush=True)
    except kdtr.KdtrError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    except OSError as error:
        print(f"errno {error.errno}: {error}", flush=True)

def write(value, count, path):
    kdtr.write(path, {"x": np.full(int(count), float(value))})
    return "written"

def read(path):
    x = kdtr.read(path)["x"]
    assert (x == x[0]).all(), "a mixture"
    return f"{x[0]:g} {x.size}"

mode, *words = sys.argv[1:]
if mode == "write":
    for path in words[2:]:
        attempt(lambda: write(*words[:2], path))
elif mode == "loop":
    write(*words)
    print("started", flush=True)
    while True:
        write(*words)
elif mode == "read":
    for path in words:
        attempt(lambda: read(path))
"""
CPP = r"""
#include <iostream>
#include <thread>
#include <typeinfo>

#include "kdtr.hpp"

template <class Action>
void attempt(Action action) {
    try {
        std::cout << action() << std::endl;
    } catch (const kdtr::KdtrError& e) {
        const std::string type = typeid(e).name(), name = type.substr(type.find("Kdtr"));  // mangled, with an E behind
        std::cout << name.substr(0, name.size() - 1) << ": " << e.what() << std::endl;
    } catch (const std::system_error& e) {
        std::cout << "errno " << e.code().value() << ": " << e.what() << std::endl;
    }
}

std::string write(int value, std::size_t count, const std::string& path) {
    const std::vector<double> x(count, value);
    kdtr::write(path, {kdtr::Tensor::of<double>("x", {count}, x.data())});
    return "written";
}

std::string read(const std::string& path) {
    const kdtr::File file = kdtr::read(path);
    const kdtr::Tensor& x = file.at("x");
    for (std::size_t i = 0; i < x.size(); ++i)
        if (x.as<double>()[i] != x.as<double>()[0]) throw std::logic_error("a mixture");
    return std::to_string(int(x.as<double>()[0])) + " " + std::to_string(x.size());
}

int main(int argc, char** argv) {
    const std::vector<std::string> words(argv + 1, argv + argc);
    if (words[0] == "write") {
        for (std::size_t i = 3; i < words.size(); ++i)
            attempt([&] { return write(std::stoi(words[1]), std::stoull(words[2]), words[i]); });
    } else if (words[0] == "loop") {
        for (bool first = true;; first = false) {
            write(std::stoi(words[1]), std::stoull(words[2]), words[3]);
            if (first) std::cout << "started" << std::endl;
        }
    } else if (words[0] == "read") {
        for (std::size_t i = 1; i < words.size(); ++i) attempt([&] { return read(words[i]); });
    } else if (words[0] == "threads") {  // four writers and this reader; each file has as many numbers as their value
        write(1000, 1000, words[1]);
        std::vector<std::thread> writers;
        for (int value : {1001, 1002, 1003, 1004}) {
            writers.emplace_back([&, value] {
                for (int i = 0; i < 25; ++i) write(value, std::size_t(value), words[1]);
            });
        }
        for (int i = 0; i < 200; ++i) {
            const std::string found = read(words[1]);
            if (found.substr(0, 4) != found.substr(5)) throw std::logic_error("a mixture");
        }
        for (std::thread& writer : writers) writer.join();
        std::cout << "whole" << std::endl;
    } else if (words[0] == "shrink") {  // somebody else cuts the file to 1 KB while it is read
        std::thread other([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(std::stoi(words[2])));
            std::filesystem::resize_file(words[1], 1024);
        });
        attempt([&] { return read(words[1]); });
        other.join();
    }
}
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "files.py").write_text(PYTHON, encoding="utf-8")
    package = Path(kdtr.__file__).parent
    commands = {"Python": [sys.executable, str(folder / "files.py"), str(package)]}
    if shutil.which("g++"):
        (folder / "files.cpp").write_text(CPP, encoding="utf-8")
        flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", "-I", str(package / "include")]
        subprocess.run(["g++", *flags, "files.cpp", "-o", "files"], cwd=folder, check=True, timeout=120)
        commands["C++"] = [str(folder / "files")]
    return commands


@pytest.fixture(params=["Python", "C++"])
def command(request, programs) -> list[str]:
    if request.param not in programs:
        pytest.skip("needs g++")
    return programs[request.param]


def run(command: list[str], *words: object, **options) -> list[str]:
    """The lines that are printed. The time limit catches what waits for ever."""
    done = subprocess.run([*command, *map(str, words)], capture_output=True, encoding="utf-8", timeout=60, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def start_loop(command: list[str], path: Path, value: int, count: int) -> subprocess.Popen[str]:
    words = [*command, "loop", str(value), str(count), str(path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, encoding="utf-8")
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


def leftovers(folder: Path) -> list[Path]:
    """Temporary files; nothing else may stand beside a.kdtr."""
    others = [path for path in folder.iterdir() if path.name != "a.kdtr"]
    assert all(re.fullmatch(r"\.kdtr-[0-9a-f-]+\.tmp", path.name) for path in others)
    return others


# ---- interrupted and simultaneous writers ---------------------------------------------------------------------------


def test_a_killed_writer_leaves_a_whole_file_and_at_most_a_temporary_one(tmp_path, command):
    path = tmp_path / "a.kdtr"
    for kills in range(1, 5):
        old = set(leftovers(tmp_path))
        writer = start_loop(command, path, kills, 300_000 + kills)
        end = time.monotonic() + 20
        while set(leftovers(tmp_path)) == old:
            assert time.monotonic() < end
        kill(writer)
        x = kdtr.read(path)["x"]
        assert x.size == 300_000 + kills and (x == kills).all()
        assert len(leftovers(tmp_path)) <= len(old) + 1
    after = leftovers(tmp_path)
    assert after, "no writer was killed in the middle of its work"
    assert run(command, "write", 7, 10, path) == ["written"] and kdtr.read(path)["x"].tolist() == [7.0] * 10
    assert leftovers(tmp_path) == after, "a temporary file may be another writer's: none is touched"


@pytest.mark.parametrize("point", ["fsync", "replace"])
def test_a_kill_just_before_the_file_is_in_place_leaves_the_old_one(tmp_path, programs, point):
    path = tmp_path / "a.kdtr"
    kdtr.write(path, {"x": np.ones(3)})
    old = path.read_bytes()
    deadly = f"import os\nos.{point} = lambda *args: os.kill(os.getpid(), 9)\n"
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "deadly.py").write_text(deadly + PYTHON, encoding="utf-8")
    interpreter, _, package = programs["Python"]
    words = [interpreter, tmp_path / "program" / "deadly.py", package, "write", "2", "1000", path]
    assert subprocess.run(words, timeout=60).returncode == -9
    assert path.read_bytes() == old
    temporary = [file for file in tmp_path.iterdir() if file.name.startswith(".kdtr-")]
    assert len(temporary) == 1 and kdtr.read(temporary[0])["x"].size == 1000


def test_processes_of_both_languages_write_one_path_and_readers_see_whole_files(tmp_path, programs):
    path = tmp_path / "a.kdtr"
    kdtr.write(path, {"x": np.full(5000, 5000.0)})
    writers = []
    try:
        for value, command in enumerate([*programs.values()] * 2, start=5001):
            writers.append(start_loop(command, path, value, value))
        seen = set()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            for copy in (False, True):
                x = kdtr.read(path, copy=copy)["x"]
                assert x.size == x[0] and (x == x[0]).all()
                seen.add(x.size)
        for command in programs.values():
            lines = run(command, "read", *[path] * 20)
            assert all(line.split()[0] == line.split()[1] for line in lines) and len(lines) == 20
        assert all(writer.poll() is None for writer in writers), "a writer failed"
    finally:
        for writer in writers:
            kill(writer)
    assert len(seen) > 1, "the writers did not get in each other's way"
    assert len(leftovers(tmp_path)) <= len(writers)


def test_threads_of_one_process_write_one_path(tmp_path, programs):
    if "C++" not in programs:
        pytest.skip("needs g++")
    assert run(programs["C++"], "threads", tmp_path / "a.kdtr") == ["whole"]
    assert leftovers(tmp_path) == []


# ---- where nothing can be written -----------------------------------------------------------------------------------

SANDBOX = r"""
mount -t tmpfs -o size=256k none "$1" && cd "$1" && shift || exit 77
"$@" write 1 100 a.kdtr
"$@" write 2 100000 a.kdtr b.kdtr
mount -o remount,ro . || exit 77
"$@" write 4 100 a.kdtr
"$@" read a.kdtr
ls -A
"""


def test_a_full_disk_and_a_read_only_one_leave_the_old_file(tmp_path, command):
    # A file system in memory that holds 256 KB, in a mount namespace which ends with the shell.
    for unshare in (["unshare", "-m"], ["unshare", "-rm"]):
        words = [*unshare, "sh", "-c", SANDBOX, "sh", str(tmp_path), *command]
        try:
            done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=60)
        except FileNotFoundError:
            pytest.skip("needs unshare")
        if done.returncode == 0:
            break
    else:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    first, full, new, read_only, still, *names = done.stdout.splitlines()
    assert (first, still, names) == ("written", "1 100", ["a.kdtr"])
    assert full.startswith(f"errno {errno.ENOSPC}: ") and "a.kdtr" in full
    assert new.startswith(f"errno {errno.ENOSPC}: ") and "b.kdtr" in new
    assert read_only.startswith(f"errno {errno.EROFS}: ") and "a.kdtr" in read_only


def test_a_folder_of_somebody_else_can_be_read_and_not_written(programs):
    if "C++" not in programs:
        pytest.skip("needs g++")  # for Python see test_read_only_folder
    with tempfile.TemporaryDirectory() as name:  # not tmp_path, whose parents are closed to others
        folder = Path(name)
        kdtr.write(folder / "a.kdtr", {"x": np.ones(3)})
        shutil.copy(programs["C++"][0], folder / "files")
        folder.chmod(0o555)
        # Permissions mean nothing to root.
        nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        command = [str(folder / "files")]
        try:
            (line,) = run(command, "write", 2, 10, folder / "a.kdtr", **nobody)
            assert run(command, "read", folder / "a.kdtr", **nobody) == ["1 3"]
        finally:
            folder.chmod(0o755)
        assert line.startswith(f"errno {errno.EACCES}: {folder}/a.kdtr: cannot write the KDTR file")
        assert sorted(path.name for path in folder.iterdir()) == ["a.kdtr", "files"]


def test_folders_that_take_no_files(tmp_path, command):
    (tmp_path / "file").touch()
    paths = ["/proc/a.kdtr", "/sys/a.kdtr", f"{tmp_path}/missing/a.kdtr", f"{tmp_path}/file/a.kdtr"]
    for path, line in zip(paths, run(command, "write", 1, 1, *paths), strict=True):
        assert re.match(r"errno \d+: ", line) and path in line
        assert not os.path.exists(path)


# ---- what is no ordinary file ----------------------------------------------------------------------------------------


@pytest.fixture
def special(tmp_path) -> dict[str, Path]:
    """Paths that are neither files nor folders. The nodes are the test's own, in case that one is replaced."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    found = {"pipe": tmp_path / "pipe", "link": tmp_path / "link"}
    try:
        for name, minor in [("null", 3), ("zero", 5), ("full", 7)]:
            os.mknod(tmp_path / name, 0o020666, os.makedev(1, minor))
            found[name] = tmp_path / name
    except PermissionError:
        pass  # only root makes them, and not everywhere
    return found


def test_pipes_and_devices_are_refused_and_stay(tmp_path, command, special):
    devices = [Path("/dev/null"), Path("/dev/zero"), Path("/dev/full")]
    kinds = {path: path.stat().st_mode for path in special.values()}
    paths = [*special.values(), *devices]
    for path, line in zip(paths, run(command, "read", *paths), strict=True):
        assert line.startswith(f"errno {errno.EINVAL}: ") and "is not a regular file" in line and str(path) in line
    paths = [*special.values()]
    for path, line in zip(paths, run(command, "write", 1, 1, *paths), strict=True):
        assert line.startswith(f"errno {errno.EINVAL}: ") and "is not a regular file" in line and str(path) in line
    assert {path: path.stat().st_mode for path in special.values()} == kinds
    assert {path.name for path in tmp_path.iterdir()} == set(special)


def test_a_socket_a_folder_no_file_and_an_empty_one(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to("loop")
    lines = run(command, "read", "socket", ".", "missing", "empty", "loop", "n" * 300)
    wanted = [
        r"errno (6|22)",
        "errno 21",
        "errno 2",
        "KdtrEmptyError",
        f"errno {errno.ELOOP}",
        f"errno {errno.ENAMETOOLONG}",
    ]
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.match(pattern + ": ", line), line
    lines = run(command, "write", 1, 1, "socket", ".")
    assert [line.split(": ")[0] for line in lines] == [f"errno {errno.EINVAL}", f"errno {errno.EISDIR}"]


def test_paths_with_spaces_and_letters_beyond_ascii(tmp_path, command):
    folder = tmp_path / "Ein Ordner für Maße 漢字 🌳"
    folder.mkdir()
    names = ["fünf Fälle.kdtr", "a  b\tc.kdtr", "line\nend.kdtr", "-read", "x" * 250 + ".kdtr"]
    paths = [folder / name for name in names]
    assert run(command, "write", 3, 4, *paths) == ["written"] * 5
    assert {path.name for path in folder.iterdir()} == set(names)
    assert run(command, "read", *paths) == ["3 4"] * 5
    assert all(kdtr.read(path)["x"].tolist() == [3.0] * 4 for path in paths)
    (folder / "kaputt für immer").write_bytes(b"x")
    (line,) = run(command, "read", folder / "kaputt für immer")
    assert line.startswith("KdtrMagicError: ") and "漢字 🌳/kaputt für immer" in line


def test_links_to_files_that_are_not_there_yet_are_followed_and_loops_refused(tmp_path, command):
    (tmp_path / "folder").mkdir()
    (tmp_path / "first").symlink_to("folder/second")
    (tmp_path / "folder" / "second").symlink_to("real.kdtr")
    (tmp_path / "loop").symlink_to("loop")
    followed, refused = run(command, "write", 5, 2, tmp_path / "first", tmp_path / "loop")
    assert followed == "written" and refused.startswith(f"errno {errno.ELOOP}: ") and "loop" in refused
    assert kdtr.read(tmp_path / "folder" / "real.kdtr")["x"].tolist() == [5.0, 5.0]
    links = [tmp_path / "first", tmp_path / "folder" / "second", tmp_path / "loop"]
    assert all(link.is_symlink() for link in links)
    assert len(list(tmp_path.rglob("*"))) == 5


# ---- files that change while they are read --------------------------------------------------------------------------


def test_a_file_that_shrinks_under_the_cpp_reader_is_truncated(tmp_path, programs):
    if "C++" not in programs:
        pytest.skip("needs g++")
    for delay in (20, 10, 5, 2, 1, 40, 80):
        kdtr.write(tmp_path / "a.kdtr", {"x": np.ones(10**6), "y": np.ones(10**6)})
        (line,) = run(programs["C++"], "shrink", tmp_path / "a.kdtr", delay)
        assert re.match(f"KdtrTruncatedError: {tmp_path}/a.kdtr: |1 1000000$", line), line
        if "became shorter while it was read" in line:
            break
    assert "became shorter while it was read" in line, "the file was never cut in the middle of a read"


@pytest.mark.parametrize("copy", [False, True], ids=["mapped", "copied"])
@pytest.mark.parametrize("length", [0, 1000])
def test_a_file_that_shrinks_under_the_python_reader_is_truncated(tmp_path, monkeypatch, copy, length):
    path = tmp_path / "a.kdtr"
    kdtr.write(path, {"x": np.ones(10_000)})
    real = mmap.mmap

    def shrink_first(*args, **options):
        os.truncate(path, length)
        return real(*args, **options)

    monkeypatch.setattr(mmap, "mmap", shrink_first)
    with pytest.raises(kdtr.KdtrTruncatedError, match=r"a\.kdtr: became shorter while it was read"):
        kdtr.read(path, copy=copy)


def test_a_copy_is_as_good_as_a_map_and_outlives_changes_in_place(tmp_path):
    path = tmp_path / "a.kdtr"
    tensors = {"x": np.arange(10_000.0), "empty": np.zeros((3, 0), np.float16), "scalar": np.int8(-3)}
    kdtr.write(path, tensors)
    found = kdtr.read(path, copy=True)
    assert list(found) == list(tensors)
    os.truncate(path, 0)
    for name, array in found.items():
        np.testing.assert_array_equal(array, tensors[name])
        assert array.dtype == tensors[name].dtype
        assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous
    found["x"][...] = 7  # the caller's own
    np.testing.assert_array_equal(found["scalar"], tensors["scalar"])


def test_a_file_that_grows_after_it_was_opened_is_read_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.kdtr"
    kdtr.write(path, {"x": np.ones(10)})
    real = mmap.mmap

    def grow_first(*args, **options):
        with open(path, "ab") as file:
            file.write(b"more")
        return real(*args, **options)

    monkeypatch.setattr(mmap, "mmap", grow_first)
    for copy in (False, True):
        kdtr.write(path, {"x": np.ones(10)})
        assert kdtr.read(path, copy=copy)["x"].tolist() == [1.0] * 10
