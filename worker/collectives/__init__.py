"""Collectives between workers that need no torch: groups of ranks on one host, over shared memory."""
