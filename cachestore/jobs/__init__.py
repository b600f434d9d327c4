"""One run of a job: from options to a report."""
