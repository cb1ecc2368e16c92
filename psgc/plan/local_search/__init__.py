"""Local search: plans that small changes make shorter (coordinate descent over options, moves of buckets), and the tables they are priced from."""
