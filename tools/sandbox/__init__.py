"""Sandboxes: where the tools of one job act."""
