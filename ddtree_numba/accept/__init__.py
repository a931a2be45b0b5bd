"""Accepting a path of the tree: greedy walk, lossless sampling, moving what was accepted next to the prefix."""
