"""Helpers for processes, memory, threads, files and logs of this machine."""
