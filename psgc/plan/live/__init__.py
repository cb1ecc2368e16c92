"""``auto``: what a running job's gradients should travel by, from what it measures of itself. Pure."""
