"""What users point at: folders, rows, tars, values in memory."""
