"""Calls on tensors by name (push_pull, broadcast), and torch tensors as a bucket's memory."""
