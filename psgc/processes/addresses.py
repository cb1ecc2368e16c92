"""Hosts and ports as people write them and as sockets take them: names, IPv4, and IPv6 with or without brackets.

Names are looked up where a function says so; nothing here sends a byte.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
from typing import Any, Final

from psgc.errors import ConfigError, PsgcError

SCHEME: Final = "tcp://"
BACKLOG: Final = 4096
_SIOCGIFADDR: Final = 0x8915


def bare_host(text: str) -> str:
    """The host without brackets: "[::1]" becomes "::1". Raises ValueError if the text has a port, a path or an unpaired bracket."""
    host = text.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError(f"{text!r}: brackets are for IPv6 addresses")
    if not host or any(sign in host for sign in "[]/ ") or host.count(":") == 1:
        raise ValueError(f"{text!r} is no host")
    if ":" in host:
        ipaddress.IPv6Address(host)
    return host


def join(host: str, port: int) -> str:
    """ "host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unmapped(host: str) -> str:
    """An IPv4 address as such, where a socket of both families shows it as "::ffff:10.0.0.1"."""
    return host.removeprefix("::ffff:") if "." in host else host


def split(text: str) -> tuple[str, int]:
    """Host, without brackets, and port of "host:port" or "[host]:port", with or without "tcp://". Raises ValueError."""
    host, colon, port = text.removeprefix(SCHEME).rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 1 << 16 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text!r}: expected host:port, an IPv6 address in brackets as in [::1]:9000")
    return bare_host(host), int(port)


def endpoint(host: str, port: int) -> str:
    """ "tcp://host:port"."""
    return SCHEME + join(host, port)


def is_loopback(host: str) -> bool:
    """Whether only the machine itself reaches this host: an address of 127.0.0.0/8, ::1, or the name localhost. Looks nothing up: on many machines
    their own name leads to 127.0.1.1, and means the network's address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") == "localhost" or host.lower().endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def needs_ipv6(host: str) -> bool:
    """Whether ``host`` is reached by IPv6: an IPv6 address, or a name that has no IPv4 address (or none yet). A name that has both is reached
    by IPv4: many networks have IPv6 addresses that do not work."""
    if host in ("*", ""):
        return True  # listens on both
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        pass
    try:
        return not socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return True


def lookup(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Socket addresses of ``host``, IPv4 first. Raises OSError if the name cannot be resolved."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted(
        ((socket.AddressFamily(family), address) for family, _, _, _, address in found), key=lambda each: each[0] != socket.AF_INET
    )


def listening_socket(port: int = 0, host: str = "") -> socket.socket:
    """A socket that listens at ``host``, or for both IPv4 and IPv6 where the machine has both. Raises PsgcError if the port is taken."""
    try:
        if host:
            family, address = lookup(host, port)[0]
            return socket.create_server(address, family=family, backlog=BACKLOG)
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # in use: IPv4 alone would listen where somebody else does
                    raise
        return socket.create_server(("", port), backlog=BACKLOG)
    except OSError as error:
        where = join(host, port) if host else f"port {port}"
        raise PsgcError(
            f"cannot listen on {where}: {error.strerror or error}; is another job using the port, or is the address another machine's?"
        ) from None


def interface_address(name: str, setting: str) -> str:
    """Its IPv4 address. setting: the variable that names it, for the error. Raises ConfigError if there is no such interface, or it has no address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            known = ", ".join(sorted(interface for _, interface in socket.if_nameindex()))
            raise ConfigError(f"{setting}: no interface {name!r} with an IPv4 address; this machine has {known}") from None
    return socket.inet_ntoa(answer[20:24])
