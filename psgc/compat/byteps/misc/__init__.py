"""BytePS's modules for particular trainings."""
