"""What a worker keeps on a GPU for schemes of one round."""
