"""Caches of other trainers: names, containers and tensors, one module for each trainer. Pure functions; `table` lists them."""
