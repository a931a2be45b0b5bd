"""Drafters: what guesses the next tokens.

A drafter is a callable ``drafter(contexts, draft_positions, vocabulary)``. It is given the tokens of each request so
far, the last of which is the tree's root, and returns float32 [B, L, V] on the host: for each request and each of the
next L positions the log-probabilities, up to a constant, of all tokens. Positions are guessed apart from each other,
as a block-diffusion drafter does; the tree builder combines them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Drafter = Callable[[Sequence[Sequence[int]], int, int], np.ndarray]

FLOOR = 1e-6  # votes of a token that is not in the context


class PromptLookup:
    """Guesses that what came before comes again; needs no training.

    Each place in the context where the last n tokens stood before, for n from ``longest`` down to 1, votes for the
    tokens that came behind it, 8**n votes each. What is in the context at all has a hundredth of a vote.

    Parameters
    ----------
    longest : int
        The longest n that is looked for.

    Source: prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, longest: int = 4) -> None:
        if longest < 1:
            raise ValueError(f"longest is {longest}; it must be at least 1")
        self.longest = longest

    def __call__(self, contexts: Sequence[Sequence[int]], draft_positions: int, vocabulary: int) -> np.ndarray:
        logits = np.full((len(contexts), draft_positions, vocabulary), np.log(FLOOR), np.float32)
        for b, context in enumerate(contexts):
            tokens = np.asarray(context, np.int64)
            known, column, counts = np.unique(tokens, return_inverse=True, return_counts=True)
            votes = np.full((draft_positions, len(known)), FLOOR)
            votes += 0.01 * counts
            # Whether the n tokens that end at place i are the last n; the last place itself does not count.
            same = np.ones(max(len(tokens) - 1, 0), np.bool_)
            for n in range(1, min(self.longest, len(tokens) - 1) + 1):
                same[n - 1 :] &= tokens[: len(tokens) - n] == tokens[-n]
                same[: n - 1] = False
                for place in np.flatnonzero(same):
                    behind = column[place + 1 : place + 1 + draft_positions]
                    votes[np.arange(len(behind)), behind] += 8.0**n
            logits[b][:, known] = np.log(votes)
        return logits
