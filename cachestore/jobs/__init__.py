"""One run of a pass: from options to a report."""
