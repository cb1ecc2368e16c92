"""The texts that say why a worker cannot connect to a server over TCP, and how to mend it."""

from __future__ import annotations

import errno
from typing import Final

from psgc.processes.addresses import is_loopback, split
from psgc.transport.link import Trouble

ADVERTISED: Final = "DMLC_NODE_HOST, DMLC_PORT or PSGC_ADVERTISE where the server is started"


def remedy(address: str, same_host: bool, trouble: Trouble) -> str:
    """The end of a sentence. address: ``tcp://host:port``, as the server gave it."""
    number = trouble.number
    try:
        host, port = split(address)
    except ValueError:
        return f"that is no address; check {ADVERTISED}"
    if is_loopback(host) and not same_host:
        return f"that is this machine itself, and the server runs on another one; set {ADVERTISED} to an address that reaches it from here"
    if number == 0:
        return (
            f"what accepts connections there does not answer as that server ({trouble.text}); is it stopped or busy, or another program? "
            f"Check {ADVERTISED}"
        )
    if number == errno.ECONNREFUSED:
        return f"nobody listens there; is the server alive, and is the address right? Check {ADVERTISED}"
    if number in (None, errno.ETIMEDOUT):
        return f"nothing comes back from there; open port {port} in the firewall (DMLC_PORT fixes the number), or mend the address: check {ADVERTISED}"
    if number == errno.EAGAIN:
        return f"{trouble.text}, and the name service does not answer; mend it, or give an address instead of a name: check {ADVERTISED}"
    if number == errno.EADDRNOTAVAIL:
        return f"{host!r} cannot be looked up here; give an address that can: check {ADVERTISED}"
    return f"{trouble.text}; is there a route to it? Check the network, and {ADVERTISED}"
