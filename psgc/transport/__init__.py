"""How messages travel: ZeroMQ over TCP, shared memory between peers on one host. Knows headers, not their meaning."""
