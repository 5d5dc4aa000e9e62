"""The rollout broker: jobs, stage processes, results, batches."""
