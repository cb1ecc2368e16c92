"""What the GPU sides of codecs share: launching, and operations on elements."""
