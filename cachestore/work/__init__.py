"""Divides the work among workers: plans, partitions, claims, ledgers, progress. Knows units and small files, but no values."""
