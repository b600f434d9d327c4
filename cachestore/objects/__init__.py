"""Object stores: their addresses, and the client that talks to them. Knows bytes and keys, but no segment and no catalog."""
