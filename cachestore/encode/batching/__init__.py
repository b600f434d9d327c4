"""Units, batches and the pipeline of an encoder."""
