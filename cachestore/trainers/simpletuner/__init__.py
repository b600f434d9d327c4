"""The caches of SimpleTuner."""
