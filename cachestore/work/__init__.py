"""Who makes what: plans, partitions, claims, ledgers, progress. Knows units and small files, no values. Imports nothing by itself."""
