"""Verifying, repairing and tidying up a store, and checking the machine that it is on."""
