"""What all processes of a service count, and how Prometheus gets it."""
