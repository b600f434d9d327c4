"""The caches of NeMo Automodel."""
