"""`prorl eval`, `prorl view`, `prorl regrade` and `prorl cheats`: run folders, their figures, and their reports."""
