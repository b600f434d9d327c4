"""Read a store, and write to it."""
