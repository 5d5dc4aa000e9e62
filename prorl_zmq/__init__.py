"""prorl_zmq: rollouts of LLM agents for RL training, as a ZeroMQ service.

A trainer needs `RolloutClient` (or `AsyncRolloutClient`), `Job` and `Trajectory`; the rest is the service's.
"""
