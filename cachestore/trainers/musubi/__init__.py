"""The caches of musubi-tuner."""
