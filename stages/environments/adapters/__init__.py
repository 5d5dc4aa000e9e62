"""The adapters of known environments: files that run in the environment's interpreter, and import nothing of ours."""
