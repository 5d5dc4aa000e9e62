"""The kinds of sandbox of this package: bubblewrap, Apptainer, and plain processes."""
