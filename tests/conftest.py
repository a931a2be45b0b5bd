"""Imported before all tests: the package chooses its backend, which must happen before anything imports numba.cuda."""

import pytest

import ddtree_numba  # noqa: F401  before all else that imports numba.cuda
from ddtree_numba.attention import remembered


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Tests change what calls with the same arrays would launch, such as the sizes of tiles."""
    remembered.forget()
