"""Sessions: a live bash, Python or Jupyter kernel in a container, for the tool calls of an agent."""
