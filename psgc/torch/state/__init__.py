"""What codecs keep between steps: collected, saved and loaded."""
