"""Who makes what: plans, claims, ledgers, workers and their progress, through files alone."""
