"""Starts, watches and ends a launcher's processes together. Knows nothing of what they compute."""
