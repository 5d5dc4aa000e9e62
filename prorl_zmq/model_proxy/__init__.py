"""The model proxy: the HTTP APIs that agent harnesses speak, in front of a model that takes and gives token ids."""
