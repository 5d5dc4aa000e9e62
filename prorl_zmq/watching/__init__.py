"""What those see who look at a service: the state of all its brokers, kept up to date (see `watcher`)."""
