"""How models write tool calls: one module per form, each with `parse` and `example`."""
