"""What a plan is made from: measured or estimated jobs and clusters, as files and as records. Knows nothing of plans."""
