"""This process's membership of the job: entering, leaving, and what is told of the run."""
