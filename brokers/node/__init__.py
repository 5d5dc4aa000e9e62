"""The node broker, between the stage processes of one node and the rollout brokers."""
