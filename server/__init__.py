"""The summation service: for each key and step, the payloads of all workers come in and one result goes out."""
