"""The HTTP gateway: ProRL Agent's REST API and a plain JSON API, in front of the front door."""
