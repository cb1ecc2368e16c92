"""What ``psgc bench`` measures."""
