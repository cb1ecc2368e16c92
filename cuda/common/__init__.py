"""What the GPU sides of codecs share: the interface, launching, and operations on elements."""
