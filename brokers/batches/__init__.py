"""Batches of groups: the sampler and what runs it."""
