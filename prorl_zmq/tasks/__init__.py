"""Data files of the package's tasks: row formats, the instances made of rows, and jobs made of instances."""
