"""Processes that compute rewards, separate from the stage process's loop."""
