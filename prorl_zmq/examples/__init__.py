"""Whole programs that use the package as a trainer does: to run, to read, and to begin one's own from."""
