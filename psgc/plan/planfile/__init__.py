"""Plan files: their format, the job that a plan is for, and whether this version can run it."""
