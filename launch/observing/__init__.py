"""Code that the observing verbs share: timelines as tables, and the live table."""
