"""The measurements of ``psgc bench``."""
