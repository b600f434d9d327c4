"""The caches of ltx-trainer."""
