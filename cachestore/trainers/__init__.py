"""Imports caches of other trainers, and exports data sets as such caches."""
