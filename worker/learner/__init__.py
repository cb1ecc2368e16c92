"""A learner's side of the conversation with a syncer."""
