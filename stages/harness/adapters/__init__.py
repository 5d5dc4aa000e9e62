"""One file per harness: its package, command line and settings, and what its requests say about the caller."""
