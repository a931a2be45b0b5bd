"""The captured step of a real model: its files are the oracles' results, and hold what random inputs lack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddtree_numba import check, kdtr
from refs import accept, make_captures, oracle, trees

FOLDER = Path(make_captures.__file__).parent / "captured"
ATTENTION = [f"verify_attn_layer{n}_smollm2" for n in make_captures.LAYERS]
ARGUMENTS = ("q", "kv_cache", "cache_seqlens", "tree_mask", "sm_scale", "kv_lora_rank")


def stored(name: str):
    return kdtr.read(FOLDER / f"{name}.kdtr")


def assert_rounded(found: np.ndarray, exact: np.ndarray) -> None:
    """Equal but for the last bit, which a mathematical library may change."""
    assert (np.abs(found - exact) <= np.spacing(np.abs(found))).all()


def test_files_are_small_and_part_of_check():
    names = ["accept_greedy_smollm2", "build_tree_smollm2", "topk_logprobs_smollm2", *ATTENTION]
    paths = sorted(FOLDER.iterdir())
    assert [path.stem for path in paths] == names and sum(path.stat().st_size for path in paths) < 3e6
    assert set(paths) < set(check.reference_files())


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_the_oracles(name):
    t = stored(name)
    out, lse = oracle.verify_attention(**{argument: t[argument] for argument in ARGUMENTS})
    assert_rounded(t["out"], out)
    assert_rounded(t["lse"], lse)
    for statistic, value in oracle.logit_statistics(**{argument: t[argument] for argument in ARGUMENTS}).items():
        np.testing.assert_allclose(t[statistic], value, rtol=1e-12)


def test_candidates_tree_and_path_are_the_oracles():
    t = stored("topk_logprobs_smollm2")
    logprobs, token_ids, lse = oracle.topk_logprobs(t["logits"], int(t["k"]))
    assert_rounded(t["logprobs"], logprobs)
    np.testing.assert_array_equal(t["token_ids"], token_ids)
    np.testing.assert_allclose(t["lse"], lse, rtol=1e-12)

    t = stored("build_tree_smollm2")
    tree = trees.draft_tree(t["logprobs"], t["token_ids"], t["root_tokens"], int(t["tree_budget"]))
    walk = stored("accept_greedy_smollm2")
    for name, array in tree.items():
        np.testing.assert_array_equal(t[name], array, err_msg=name)
        np.testing.assert_array_equal(walk[name], array, err_msg=name)
    for name, array in accept.accept_greedy(tree, walk["target_tokens"], walk["stop_tokens"]).items():
        np.testing.assert_array_equal(walk[f"accepted.{name}"], array, err_msg=name)
    for name in ATTENTION:
        np.testing.assert_array_equal(stored(name)["tree_mask"], tree["tree_mask"])


def test_the_path_is_long_and_the_tree_has_more():
    walk = stored("accept_greedy_smollm2")
    count = int(walk["accepted.num_accepted"][0])
    assert count >= 5 and int(walk["num_nodes"][0]) == make_captures.BUDGET + 1
    assert len(set(walk["parents"][0, 1:].tolist())) < make_captures.BUDGET, "the tree is a chain"


def test_activations_have_outliers_and_a_sink():
    """Elements 7 standard deviations out, which 29,000 normal ones do not have; a first key that takes much weight."""
    for name in ATTENTION:
        cache = stored(name)["kv_cache"]
        assert np.abs(cache).max() > 7 * cache.std()
    late = stored(ATTENTION[-1])
    scores = np.einsum("bihd,bnd->bihn", late["q"], late["kv_cache"][:, : int(late["cache_seqlens"][0])])
    weights = np.exp(scores * float(late["sm_scale"]))
    share = weights[..., 0] / weights.sum(axis=3)
    assert share.mean() > 0.3, f"{share.mean()}"
