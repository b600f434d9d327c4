"""Starting a pass, here or in processes, and saying beforehand what it will do."""
