"""A worker of a ps-lite job: the session that front ends use, over BytePS's keys and payloads."""
