"""Caches of other trainers, in and out."""
