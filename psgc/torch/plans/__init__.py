"""What gradients travel by: a codec or a plan, chosen by the script or the environment, handed out by rank 0."""
