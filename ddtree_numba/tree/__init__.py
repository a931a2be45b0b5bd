"""Draft trees: top-k log-probabilities, the best-first builder, and every encoding of a tree."""
