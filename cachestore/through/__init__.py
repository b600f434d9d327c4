"""Read what a store has, and encode what it lacks while a trainer asks for it."""
