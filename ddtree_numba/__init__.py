"""DDTree's GPU kernels for speculative decoding, in Python: draft trees and tree-verify MLA attention in Numba CUDA.

Kernels are checked against independent oracles, and most stand beside a NumPy mirror. Importing this package turns
Numba's simulator on where there is no usable GPU, so import it before `numba.cuda`.
"""

from ddtree_numba.device import runtime as _runtime  # noqa: F401  # isort: skip  (chooses the backend: before numba.cuda)

from ddtree_numba import compare, kdtr
from ddtree_numba._version import __version__
from ddtree_numba.accept.accepted import BAD_LINK, BAD_TARGET, STOPPED, Accepted
from ddtree_numba.accept.argmax_tokens import argmax_tokens
from ddtree_numba.accept.compact_kv import compact_kv, gather_accepted
from ddtree_numba.accept.greedy import accept_greedy
from ddtree_numba.accept.sampled import accept_sampled
from ddtree_numba.accept.sglang import verify_tree_greedy
from ddtree_numba.accept.target_probs import target_probs
from ddtree_numba.attention.merge import lse_from_flashmla, lse_from_log2, merge_states
from ddtree_numba.attention.prefix_tail import prefix_attention, verify_attention_prefix_tail
from ddtree_numba.attention.scale import DEEPSEEK_V3_SM_SCALE, KIMI_K2_SM_SCALE, yarn_sm_scale
from ddtree_numba.attention.verify import verify_attention, workspace_bytes
from ddtree_numba.attention.wgmma_host import AttentionPlan, plan_attention
from ddtree_numba.step import DecodeStep
from ddtree_numba.tree.build_tree import build_tree
from ddtree_numba.tree.draft_tree import DraftTree
from ddtree_numba.tree.encodings import (
    bitpacked_mask,
    dense_bias,
    depths_from_parents,
    full_mask,
    inverse_permutation,
    links_from_parents,
    mask_from_parents,
    pack_mask,
    parents_from_links,
    parents_from_mask,
    parents_from_retrieve_indices,
    parents_from_sglang,
    positions,
    qlen_only_mask,
    relabel,
    retrieve_indices,
    sglang_links,
    tensorrt_mask,
    tree_mask_from_bias,
    tree_mask_from_bitpacked,
    tree_mask_from_full_mask,
    tree_mask_from_qlen_only,
    tree_mask_from_tensorrt,
    unpack_mask,
)
from ddtree_numba.tree.topk_logprobs import topk_logprobs

__all__ = [
    "Accepted",
    "AttentionPlan",
    "BAD_LINK",
    "BAD_TARGET",
    "DEEPSEEK_V3_SM_SCALE",
    "DecodeStep",
    "DraftTree",
    "KIMI_K2_SM_SCALE",
    "STOPPED",
    "__version__",
    "accept_greedy",
    "accept_sampled",
    "argmax_tokens",
    "bitpacked_mask",
    "build_tree",
    "compact_kv",
    "compare",
    "dense_bias",
    "depths_from_parents",
    "full_mask",
    "gather_accepted",
    "inverse_permutation",
    "kdtr",
    "links_from_parents",
    "lse_from_flashmla",
    "lse_from_log2",
    "mask_from_parents",
    "merge_states",
    "pack_mask",
    "parents_from_links",
    "parents_from_mask",
    "parents_from_retrieve_indices",
    "parents_from_sglang",
    "plan_attention",
    "positions",
    "prefix_attention",
    "qlen_only_mask",
    "relabel",
    "retrieve_indices",
    "sglang_links",
    "target_probs",
    "tensorrt_mask",
    "topk_logprobs",
    "tree_mask_from_bias",
    "tree_mask_from_bitpacked",
    "tree_mask_from_full_mask",
    "tree_mask_from_qlen_only",
    "tree_mask_from_tensorrt",
    "unpack_mask",
    "verify_attention",
    "verify_attention_prefix_tail",
    "verify_tree_greedy",
    "workspace_bytes",
    "yarn_sm_scale",
]
