"""Rollouts for trainers' frameworks: one module for each, under its own names.

An adapter only renames and re-aligns, in numpy and plain Python; functions that need a framework's classes import it
when they are called. Advantages, losses and padding rules stay the framework's.
"""
