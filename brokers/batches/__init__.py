"""Batches of groups: the sampler and its journal notes."""
