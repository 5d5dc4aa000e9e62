"""Rollouts led by an unmodified agent program (a harness), which runs in the sandbox and calls the model by HTTP."""
