"""Object stores: addresses, the client and its helper processes, push, pull, and reading from an address."""
