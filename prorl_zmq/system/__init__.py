"""Helpers for this machine's processes, memory, threads, files and logs."""
