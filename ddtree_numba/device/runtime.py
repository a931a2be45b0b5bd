"""Which backend runs the kernels: a CUDA GPU, or Numba's simulator when there is no driver.

Numba chooses between the two when `numba.cuda` is imported, and cannot change afterwards. So this module runs first:
it probes the CUDA driver and, where none is usable, turns the simulator on before `numba.cuda` is imported anywhere in
this package. An explicit ``NUMBA_ENABLE_CUDASIM`` (0 or 1) always wins.

No other module of this package may import `numba.cuda` before `choose_backend` has run; `ddtree_numba/__init__.py`
calls it first of all.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys


def probe_driver() -> str | None:
    """Ask the CUDA driver library itself whether a GPU can be used.

    Numba's own `cuda.is_available()` says True in the simulator, so it cannot tell.

    Returns
    -------
    str or None
        None when at least one GPU is usable, else the reason why not.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return f"the CUDA driver library {name} is not installed"
    status = driver.cuInit(0)
    if status != 0:
        return f"the CUDA driver does not start (cuInit gave error {status})"
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return "the CUDA driver sees no GPU"
    return None


def choose_backend() -> tuple[bool, str]:
    """Turn the simulator on if it is needed; must run before `numba.cuda` is imported.

    Returns
    -------
    simulator : bool
        True when kernels run in Numba's simulator.
    reason : str
        Why, in one sentence, for people.
    """
    import numba

    asked = os.environ.get("NUMBA_ENABLE_CUDASIM")
    if "numba.cuda" in sys.modules:
        simulator = bool(numba.config.ENABLE_CUDASIM)
        how = "on" if simulator else "off"
        return simulator, f"numba.cuda was imported before ddtree_numba, with the simulator {how}"
    if asked in ("0", "1"):
        numba.config.ENABLE_CUDASIM = int(asked)  # the variable may have been set after numba was imported
        return asked == "1", f"NUMBA_ENABLE_CUDASIM={asked} is set"
    problem = probe_driver()
    if problem is None:
        return False, "a CUDA GPU was found"
    # Both: numba reads the variable when it is imported, and it may have been imported already.
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    numba.config.ENABLE_CUDASIM = 1
    logging.getLogger("ddtree_numba").warning(
        "ddtree_numba: %s, so kernels run in Numba's simulator, exact but very slow "
        "(NUMBA_ENABLE_CUDASIM=1 chooses it silently, =0 forbids it)",
        problem,
    )
    return True, problem


SIMULATOR, REASON = choose_backend()


def has_gpu() -> bool:
    """Whether kernels run on a GPU: the simulator is off, and the driver sees one."""
    return not SIMULATOR and _probed() is None


def require_backend() -> None:
    """Refuse to launch where no kernel can run, and say what to do.

    Raises
    ------
    RuntimeError
        The simulator is off (by NUMBA_ENABLE_CUDASIM=0, or because `numba.cuda` was imported first) and there is no
        usable GPU.
    """
    if SIMULATOR:
        return
    problem = _probed()
    if problem is None:
        return
    if "imported before" in REASON:
        advice = "import ddtree_numba before numba.cuda, or set NUMBA_ENABLE_CUDASIM=1 in the environment"
    else:
        advice = "unset NUMBA_ENABLE_CUDASIM or set it to 1 to run in Numba's simulator"
    raise RuntimeError(f"no kernel can run: {problem}, and the simulator is off ({REASON}). To go on, {advice}.")


@functools.cache
def _probed() -> str | None:
    return probe_driver()
