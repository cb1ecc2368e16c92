"""A worker's connections to its servers: made, proved, measured, and made again."""
