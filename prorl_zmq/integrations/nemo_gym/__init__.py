"""NeMo Gym (0.4): an agent server, `agent.ProrlAgent`, whose rollouts the service makes.

`rollouts` makes the requested rollouts, and `response` Gym's answers for them; neither needs NeMo Gym.
"""
