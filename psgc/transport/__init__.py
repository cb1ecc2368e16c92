"""How messages travel: payloads over plain TCP sockets, or shared memory between peers on one host; control over ZeroMQ.

``security`` decides who may come in, ``control`` carries what members say to the scheduler, ``memory`` is what processes share. Knows
headers, not their meaning."""
