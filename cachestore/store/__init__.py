"""Read a store, write to it, and read through it, which encodes what is missing."""
