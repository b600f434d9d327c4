"""Bytes: segments, index, catalogs, snapshots. Knows no tensors, ranks or models. Imports nothing by itself."""
