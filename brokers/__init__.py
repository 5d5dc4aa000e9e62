"""The rollout broker and the backend broker: pure cores, and the loops that drive them."""
