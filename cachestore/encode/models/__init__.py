"""Finding, loading and converting models."""
