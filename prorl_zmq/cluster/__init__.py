"""A service on the nodes of a Slurm cluster."""
