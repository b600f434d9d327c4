"""Read a store, write to it, read through it."""
