"""Files of a store: segments, index, catalogs, snapshots. Imports no torch, and nothing by itself."""
