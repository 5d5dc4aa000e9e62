"""The execution server: one per sandbox; its protocol, its client, and the process that starts it."""
