"""Which backend is chosen, in processes of their own, because the choice is made once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ddtree_numba.device import runtime

CALL = """
import numpy as np
x = np.ones((1, 1, 1, 32), np.float32)
dd.verify_attention(x, x[0], np.zeros(1, np.int32), None, sm_scale=1.0, kv_lora_rank=16, variant={variant!r})
print("called")
"""

no_gpu = pytest.mark.skipif(runtime.probe_driver() is None, reason="there is a usable GPU here")


def run(code, simulator=None):
    """Run code in a fresh process, with NUMBA_ENABLE_CUDASIM set or not."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    if simulator is not None:
        environment["NUMBA_ENABLE_CUDASIM"] = simulator
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@no_gpu
def test_without_a_gpu_the_simulator_is_used_and_said_once():
    done = run("import ddtree_numba as dd; import ddtree_numba\n" + CALL.format(variant="three_phase"))
    assert done.stdout == "called\n", done.stderr
    assert done.stderr.count("simulator") == 1 and "NUMBA_ENABLE_CUDASIM=1" in done.stderr


@no_gpu
def test_the_simulator_is_chosen_though_numba_was_imported_before():
    done = run("import numba\nimport ddtree_numba as dd\n" + CALL.format(variant="three_phase"))
    assert done.stdout == "called\n", done.stderr


def test_the_simulator_by_request_is_silent():
    done = run("import ddtree_numba as dd\n" + CALL.format(variant="three_phase"), simulator="1")
    assert (done.stdout, done.stderr) == ("called\n", "")


@no_gpu
def test_the_simulator_forbidden():
    done = run("import ddtree_numba as dd\n" + CALL.format(variant="three_phase"), simulator="0")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("RuntimeError: no kernel can run") and "unset NUMBA_ENABLE_CUDASIM" in error
    done = run("import ddtree_numba as dd\n" + CALL.format(variant="three_phase_numpy"), simulator="0")
    assert done.stdout == "called\n", "the mirror needs no backend"


@no_gpu
def test_numba_cuda_imported_before():
    done = run("import numba.cuda\nimport ddtree_numba as dd\n" + CALL.format(variant="three_phase"))
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("RuntimeError: no kernel can run") and "import ddtree_numba before numba.cuda" in error


class Driver:
    """A CUDA driver library that answers as told."""

    def __init__(self, status, gpus):
        self.status, self.gpus = status, gpus

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = self.gpus
        return 0


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (None, "is not installed"),
        (Driver(100, 0), "cuInit gave error 100"),
        (Driver(0, 0), "sees no GPU"),
        (Driver(0, 2), None),
    ],
)
def test_the_driver_is_asked(monkeypatch, driver, reason):
    def load(name):
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(runtime.ctypes, "CDLL", load)
    found = runtime.probe_driver()
    assert found is None if reason is None else reason in found


def test_a_variable_set_after_numba_was_imported():
    code = "import numba, os\nos.environ['NUMBA_ENABLE_CUDASIM'] = '1'\nimport ddtree_numba as dd\n"
    done = run(code + CALL.format(variant="three_phase"))
    assert (done.stdout, done.stderr) == ("called\n", "")
