"""Pages: what those of `report` and `inspect` share."""
