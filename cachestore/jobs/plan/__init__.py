"""From a request to a plan: options, planning, and what a plan would change."""
