"""The GPU side of `onebit`, with a scale for each block and with none."""
