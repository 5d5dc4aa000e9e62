"""Environments of other packages, each in an interpreter and processes of its own."""
