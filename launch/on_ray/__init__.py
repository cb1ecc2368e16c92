"""Jobs on a Ray cluster: what users import from ``psgc.ray``."""
