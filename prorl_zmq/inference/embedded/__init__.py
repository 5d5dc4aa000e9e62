"""The small numpy policy of this package, as an engine."""
