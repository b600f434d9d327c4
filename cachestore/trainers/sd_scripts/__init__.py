"""The caches of sd-scripts."""
