"""Rollouts that an unmodified agent program (a harness) leads: it runs in the sandbox and calls the model by HTTP."""
