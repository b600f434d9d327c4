"""Appending, committing, and publishing catalogs."""
