"""How kernels are compiled, cached and told apart."""
