"""Processes, memory, threads and logs of the machine."""
