"""Images: root filesystems that sandboxes start from, built once and kept."""
