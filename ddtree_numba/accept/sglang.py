"""verify_tree_greedy: SGLang's greedy verification, its arrays and conventions, so that an engine can compare the two.

It is the walk of greedy.py on other arrays. What differs from `accept_greedy`:

======================  ==============================================  =========================================
SGLang                  here                                            the difference
======================  ==============================================  =========================================
``candidates``          ``tree.tokens``                                 int64 there
``retrive_next_token``  ``tree.first_child``                            int64, and spelled so
``retrive_next_sibling``  ``tree.next_sibling``                         likewise; siblings in any order
``retrive_index``       the index i itself                              where node i stands in the flat arrays
``accept_index``        ``nodes``                                       global indices: ``retrive_index`` of a node
``accept_token_num``    ``num_accepted``                                neither root nor bonus counted: one less
``predicts``            ``tokens``, ``bonus_tokens``                    at the place of the node before the token
======================  ==============================================  =========================================

All results are written in place, and what no walk comes to keeps its contents; SGLang fills them with -1 beforehand.
Stop tokens are none of its concern.

One thread a request walks, in global memory. It visits at most Q nodes, and an index outside ends the walk, so that no
contents keep it running or lead it outside.

Source: github.com/sgl-project/sglang, sgl-kernel/csrc/speculative/eagle_utils.cu, VerifyTreeGreedy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba.device import arrays, runtime
from ddtree_numba.device.launch import launch

THREADS = 4 if runtime.SIMULATOR else 32


def mirror(
    candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict, predicts, accept_index,
    accept_token_num,
):  # fmt: skip
    """The kernel in NumPy: the same phases. Arguments as the kernel's, on the host."""
    batch, num_nodes = candidates.shape
    places = range(batch * num_nodes)
    for b in range(batch):
        # Phase 1: the root
        last = int(retrive_index[b, 0])
        if last not in places or accept_index.shape[1] == 0:
            accept_token_num[b] = 0
            continue
        target = target_predict[divmod(last, num_nodes)]
        accept_index[b, 0] = last
        count = visits = 0

        # Phase 2: the walk
        cur = int(retrive_next_token[b, 0])
        while 0 <= cur < num_nodes and visits < num_nodes and count + 1 < accept_index.shape[1]:
            visits += 1
            place = int(retrive_index[b, cur])
            if candidates[b, cur] != target:
                cur = int(retrive_next_sibling[b, cur])
            elif place not in places:
                break
            else:
                predicts[last] = target
                count += 1
                accept_index[b, count] = last = place
                target = target_predict[divmod(last, num_nodes)]
                cur = int(retrive_next_token[b, cur])

        # Phase 3: the bonus token
        accept_token_num[b] = count
        predicts[last] = target


@cuda.jit
def kernel(
    candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict, predicts, accept_index,
    accept_token_num,
):  # fmt: skip
    """One thread a request; all arrays as SGLang has them."""
    batch = candidates.shape[0]
    num_nodes = candidates.shape[1]
    b = cuda.grid(1)  # gpu: the grid is the mirror's loop over b
    if b >= batch:
        return

    # Phase 1: the root
    last = np.int64(retrive_index[b, 0])
    if last < 0 or last >= batch * num_nodes or accept_index.shape[1] == 0:
        accept_token_num[b] = 0
        return
    target = target_predict[last // num_nodes, last % num_nodes]
    accept_index[b, 0] = last
    count = 0
    visits = 0

    # Phase 2: the walk
    cur = np.int64(retrive_next_token[b, 0])
    while cur >= 0 and cur < num_nodes and visits < num_nodes and count + 1 < accept_index.shape[1]:
        visits += 1
        place = np.int64(retrive_index[b, cur])
        if candidates[b, cur] != target:
            cur = np.int64(retrive_next_sibling[b, cur])
        elif place < 0 or place >= batch * num_nodes:
            break
        else:
            predicts[last] = target
            count += 1
            last = place
            accept_index[b, count] = last
            target = target_predict[last // num_nodes, last % num_nodes]
            cur = np.int64(retrive_next_token[b, cur])

    # Phase 3: the bonus token
    accept_token_num[b] = count
    predicts[last] = target


def verify_tree_greedy(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
) -> None:
    """Accept the longest path of each tree that the target's choices spell, on SGLang's arrays.

    Names, order of arguments and conventions are SGLang's; `accept_greedy` is the same walk on a DraftTree.

    Parameters
    ----------
    predicts : int32 [B * Q or more]
        Written to: the target's token behind each accepted node, at the node's global index. Other places are kept;
        SGLang's engine passes one place more.
    accept_index : int32 [B, S]
        Written to: the global indices of the accepted nodes, the root first; S - 1 nodes beside it are accepted at
        most. Other places are kept.
    accept_token_num : int32 [B]
        Written to: how many nodes were accepted, the root not counted.
    candidates : int32 or int64 [B, Q]
        Token of each node.
    retrive_index : int32 or int64 [B, Q]
        Global index of each node, usually b * Q + i.
    retrive_next_token, retrive_next_sibling : int32 or int64 [B, Q]
        First child and next sibling of each node, local indices; -1 where there is none.
    target_predict : int32 or int64 [B, Q]
        The target's token at each global index.

    Raises
    ------
    TypeError
        An argument is no array that kernels take, or has the wrong dtype.
    ValueError
        A wrong shape or device; Q = 0; a result that overlaps another array.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, except for NumPy arrays, which are copied to the device
    and back. Nothing is allocated, so a call can be captured in a CUDA graph. A global index outside 0 .. B * Q - 1
    ends the walk; with a root there, or with S = 0, nothing but ``accept_token_num``, 0, is written. Requests that
    share a global index write to one place of ``predicts`` in no order.

    Source: github.com/sgl-project/sglang, sgl-kernel, verify_tree_greedy.
    """
    given = {
        "candidates": candidates,
        "retrive_index": retrive_index,
        "retrive_next_token": retrive_next_token,
        "retrive_next_sibling": retrive_next_sibling,
        "target_predict": target_predict,
    }
    read = [arrays.view(name, x) for name, x in given.items()]
    arrays.require_shape(read[0], "[B, Q]", None, None)
    batch, num_nodes = read[0].shape
    for x in read:
        arrays.require_dtype(x, np.int32, np.int64)
        arrays.require_shape(x, "[B, Q]", batch, num_nodes)
    if num_nodes < 1:
        raise ValueError(f"{read[0]} has Q = 0; it must be at least 1")
    results = {"predicts": predicts, "accept_index": accept_index, "accept_token_num": accept_token_num}
    written = [arrays.view(name, x) for name, x in results.items()]
    for x in written:
        arrays.require_dtype(x, np.int32)
    arrays.require_shape(written[0], "[B * Q or more]", None)
    if written[0].shape[0] < batch * num_nodes:
        raise ValueError(f"{written[0]} has room for less than B * Q = {batch * num_nodes} tokens")
    arrays.require_shape(written[1], "[B, S]", batch, None)
    arrays.require_shape(written[2], "[B]", batch)
    arrays.require_one_place([*read, *written])
    for n, x in enumerate(written):
        arrays.require_apart(x, [*read, *written[:n]])
    if batch:
        launch(kernel, (-(-batch // THREADS), 1, 1), THREADS, (*read, *written), results=3, shared_bytes=0)
