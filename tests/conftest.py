"""Imported before all tests: the package chooses its backend, which must happen before anything imports numba.cuda."""

import ddtree_numba  # noqa: F401
