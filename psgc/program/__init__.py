"""Programs: what a plan's options compile to, and what runs them. Pure: arrays and numbers, no torch, no sockets."""
