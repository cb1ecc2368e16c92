"""An optimizer's gradients, from backward's hook to p.grad. ``exchange.py`` is the place to begin."""
