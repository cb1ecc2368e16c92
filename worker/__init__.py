"""Inside the trainer's process: from a ready gradient to the job's aggregate of it."""
