"""Runs options over groups of ranks: programs' numbers, and the threads that carry them out."""
