"""The metrics that all processes of a service count, and their way to Prometheus."""
