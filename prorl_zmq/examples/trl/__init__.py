"""What `prorl init --trainer trl` writes."""
