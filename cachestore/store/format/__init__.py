"""What bytes mean: entries, segments, the index, catalogs, and what is marked for removal."""
