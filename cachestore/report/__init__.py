"""A page that shows what is in a store."""
