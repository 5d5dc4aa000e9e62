"""What agents act with: sandboxes and tool sessions."""
