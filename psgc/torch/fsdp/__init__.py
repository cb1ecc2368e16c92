"""Models that torch's FSDP2 (``fully_shard``) has sharded within a node: their gradients go through psgc between the nodes."""
