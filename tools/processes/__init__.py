"""Processes of this machine: the tree below one, children whose end is an event, and bounded output."""
