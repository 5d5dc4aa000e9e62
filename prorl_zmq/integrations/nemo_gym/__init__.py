"""NeMo Gym (0.4): an agent server, `agent.ProrlAgent`, whose rollouts are made by the service.

`rollouts` makes the rollouts that Gym asks for, and `response` what Gym gets for them; both work without NeMo Gym.
"""
