"""Keys to batches, for a trainer: data set, collate, bucket sampler. No model, no lock. Imports nothing by itself."""
