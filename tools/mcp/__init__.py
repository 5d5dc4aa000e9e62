"""MCP servers' tools, as tools of the agent loop."""
