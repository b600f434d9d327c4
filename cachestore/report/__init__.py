"""What is in a store, as a page."""
