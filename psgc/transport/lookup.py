"""Looks up the addresses of a host name in a thread: a name service that does not answer must not stop an I/O thread."""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
from typing import Any, Final

from psgc.processes.addresses import lookup

PATIENCE_S: Final = 0.2  # how long to wait for the first lookup, which mostly takes less; later ones are not awaited
Addresses = list[tuple[socket.AddressFamily, Any]]


class Lookup:
    """For one thread. host: a name, or an address, which needs no lookup."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._found: Addresses = []  # results of the last lookup that succeeded
        self._error: OSError | None = None  # of the last, if it failed
        self._thread: threading.Thread | None = None

    def addresses(self, again: bool) -> Addresses:
        """The addresses that were found last. again: they did not help; look the name up again, for the next call.

        Raises OSError if none have been found: gaierror says why; EAGAIN, that the lookup is still under way.
        """
        if _is_address(self._host):
            return lookup(self._host, self._port)
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is None and (again or not self._found):
            first = self._error is None and not self._found
            self._thread = threading.Thread(target=self._look, name="psgc-lookup", daemon=True)
            self._thread.start()
            if first:
                self._thread.join(PATIENCE_S)
        if self._found:
            return self._found
        raise self._error or OSError(errno.EAGAIN, f"{self._host!r} is being looked up")

    def trouble(self) -> str:
        """Why the name has no address, for as much as is known; empty if it has one. The name is looked up again, for the next call."""
        try:
            self.addresses(again=True)
        except socket.gaierror as error:
            return error.strerror or str(error)
        except OSError:
            return "the name service has not answered"
        return ""

    def _look(self) -> None:
        try:
            self._found, self._error = lookup(self._host, self._port), None
        except OSError as error:
            self._error = error


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
