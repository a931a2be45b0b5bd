"""Where this package keeps files for a user between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder for this package; the variable DDTREE_NUMBA_CACHE names another."""
    if os.environ.get("DDTREE_NUMBA_CACHE"):
        return Path(os.environ["DDTREE_NUMBA_CACHE"])
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"], "ddtree_numba", "ddtree_numba", "Cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ddtree_numba")
