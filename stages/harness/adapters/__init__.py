"""One file per harness: its package, its command line and settings, and what its requests say of who is calling."""
