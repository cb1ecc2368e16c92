"""Many small parts of sparse codecs in one launch: one program makes the whole choice of a part, and writes its payload."""
