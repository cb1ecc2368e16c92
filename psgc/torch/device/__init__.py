"""Gradients on a GPU: streams, staging memory, and encoding where they lie."""
