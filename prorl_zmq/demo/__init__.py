"""`prorl demo`: a GRPO training run of the embedded policy through the whole service."""
