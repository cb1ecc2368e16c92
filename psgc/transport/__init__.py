"""How messages travel: payloads over plain TCP sockets, or shared memory between peers on one host; control over ZeroMQ.

Knows headers, not their meaning."""
