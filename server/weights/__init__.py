"""Weights that a server holds and updates by a rule, at once or in rounds: the protocol's part, the arithmetic and the memory."""
