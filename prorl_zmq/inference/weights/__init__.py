"""Versions of weights on disk: differences to the version before, full checkpoints, and the copy of one host."""
