"""Containers: where the commands of a sandbox run, as its execution server has them."""
