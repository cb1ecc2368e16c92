"""Training that goes on when a worker dies: the loop over steps (elastic.py), its state (state.py), how that gets from rank to rank (handover.py)."""
