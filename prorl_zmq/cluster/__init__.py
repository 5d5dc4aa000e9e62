"""Runs a service on the nodes of a Slurm cluster."""
