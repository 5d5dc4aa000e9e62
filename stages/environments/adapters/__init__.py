"""The adapters of known environments.

They are files that run in the environment's interpreter, and import nothing of this package, unless the environment has
no package and runs on the service's own interpreter.
"""
