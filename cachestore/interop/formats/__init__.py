"""Caches of other trainers: names, containers and tensors, one file a trainer. Pure functions; `table` lists them."""
