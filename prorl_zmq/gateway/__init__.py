"""The HTTP gateway: ProRL Agent's REST API and a JSON API in front of the brokers."""
