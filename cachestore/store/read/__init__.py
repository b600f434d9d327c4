"""What a store holds now, and reading it."""
