"""The inputs of planning: measured or estimated jobs and clusters, as files and as records. Knows nothing of plans."""
