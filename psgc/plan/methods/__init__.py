"""How options are chosen: one file a method, and the registry of their names."""
