"""The broker of one node: between its stage processes and the rollout brokers."""
