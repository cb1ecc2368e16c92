"""How messages travel: payloads over plain TCP sockets, or shared memory between peers on one host; control over ZeroMQ.

``security`` decides who may come in, ``control`` carries messages to and from the scheduler, ``memory`` is shared memory. Knows
headers, not their meaning."""
