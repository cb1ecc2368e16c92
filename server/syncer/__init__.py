"""A syncer: outer parameters that learners push their progress to whenever they like, each over one connection that it makes itself."""
