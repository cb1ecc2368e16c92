"""``auto``: gradients travel by what a running job measures to be quickest."""
