"""Rollouts for trainers' frameworks: one module per framework, under its own names.

An adapter only renames and re-aligns, in numpy and plain Python; functions that need a framework's classes import it
when they are called. The framework computes advantages, losses and padding.
"""
