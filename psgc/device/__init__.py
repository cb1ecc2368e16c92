"""What a codec's and a scheme's GPU side is: the interface between those who move gradients on a GPU and those who have kernels for it.

Without kernels, and without triton. Whoever adds a kind of GPU implements it; ``psgc.codecs.backends`` finds what there is.
"""
