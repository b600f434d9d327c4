"""The caches of ai-toolkit."""
