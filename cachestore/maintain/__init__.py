"""Check a store, repair it, remove what nothing needs, and examine the machine."""
