"""The model proxy: the HTTP APIs of agent programs in front of a model that works on token ids."""
