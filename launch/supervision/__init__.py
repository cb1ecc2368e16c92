"""Processes that a launcher starts and ends together. Knows nothing of what they compute."""
