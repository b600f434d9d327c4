"""Turn keys into batches for a trainer: data set, collate, bucket sampler. Loads no model, takes no lock, imports nothing by itself."""
