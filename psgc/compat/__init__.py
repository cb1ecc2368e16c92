"""Names that other packages are known by. ``byteps``: put this folder on PYTHONPATH, and ``import byteps.torch`` is psgc's."""
