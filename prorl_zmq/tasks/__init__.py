"""Data files of the package's tasks: their row formats, the instances that rows become, and jobs made of them."""
