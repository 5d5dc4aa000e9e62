"""What a trainer receives: trajectories, groups, and arrays of them."""
