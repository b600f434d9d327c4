"""From captions to embeddings."""
