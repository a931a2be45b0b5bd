"""The decode loop on a GPU: the same tokens as the NumPy backend, and in every mode."""

from __future__ import annotations

import pytest
from decode_cases import write_model
from test_decode import PROMPTS

from ddtree_numba.decode import decode, load
from ddtree_numba.device import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not runtime.has_gpu(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "small.gguf")


def test_both_backends_and_all_modes_give_the_same_tokens(path):
    wanted = [reply.tokens for reply in decode(PROMPTS, loaded=load(path, "numpy"), max_tokens=20)]
    loaded = load(path, "cuda")
    for mode in ("autoregressive", "chain", "tree"):
        assert [reply.tokens for reply in decode(PROMPTS, loaded=loaded, mode=mode, max_tokens=20)] == wanted


def test_samples_are_the_same_on_both_backends(path):
    settings = {"temperature": 1.2, "top_k": 30, "top_p": 0.95, "max_tokens": 20, "seed": 11}
    wanted = [reply.tokens for reply in decode(PROMPTS, loaded=load(path, "numpy"), **settings)]
    found = [reply.tokens for reply in decode(PROMPTS, loaded=load(path, "cuda"), **settings)]
    assert found == wanted
