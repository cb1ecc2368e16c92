"""Plans as files, and as jobs: what a file holds, for which job a plan is, and what of it this runtime carries."""
