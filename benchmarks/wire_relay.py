"""A switch in user space that is slow and loses packets: for kernels without netem.  Run by testbed.py, in the switch's namespace.

Reads frames from the switch's ports and writes each to the port of its destination, ``--delay-ms`` later; one in ``1 / --loss`` it forgets.
These are the hosts' own packets (packet sockets), so TCP itself notices a loss and sends again; nothing of it is imitated. Owns that, and
which address is behind which port; knows nothing of rates, which are the ports' queues' business.
"""

from __future__ import annotations

import argparse
import random
import select
import socket
import time
from collections import deque
from typing import Final

# From linux/if_packet.h; the socket module has no names for them. A virtio header before each frame carries what network cards are left to
# do (checksums, cutting large segments), which a frame between two virtual ports never had done.
SOL_PACKET: Final = 263
PACKET_VNET_HDR: Final = 15
PACKET_IGNORE_OUTGOING: Final = 23
ETH_P_ALL: Final = 3
# From asm/socket.h: as SO_SNDBUF and SO_RCVBUF, but over the limits that sysctl sets; root may.
SO_SNDBUFFORCE: Final = 32
SO_RCVBUFFORCE: Final = 33
PORT_BUFFER_BYTES: Final = 64 << 20
VNET_HEADER_BYTES: Final = 10
MOST_FRAME_BYTES: Final = 1 << 17
BURST_FRAMES: Final = 64  # read from one port before the others have their turn


class Switch:
    """The ports, and the frames that are on their way. delay_s: of every frame; loss: the probability that one is forgotten."""

    def __init__(self, ports: list[str], delay_s: float, loss: float, seed: int) -> None:
        self._ports = [_open_port(name) for name in ports]
        self._behind: dict[bytes, socket.socket] = {}
        self._delay_s, self._loss, self._random = delay_s, loss, random.Random(seed)
        self._under_way: deque[tuple[float, socket.socket, bytes]] = deque()  # in order: all take equally long

    def serve(self) -> None:
        """Until the process is killed."""
        while True:
            due = self._under_way[0][0] - time.monotonic() if self._under_way else None
            readable, _, _ = select.select(self._ports, [], [], None if due is None else max(0.0, due))
            for port in readable:
                self._take_in(port)
            self._deliver(time.monotonic())

    def _take_in(self, port: socket.socket) -> None:
        now = time.monotonic()
        for _ in range(BURST_FRAMES):
            try:
                frame = port.recv(MOST_FRAME_BYTES)
            except BlockingIOError:
                return
            destination, source = frame[VNET_HEADER_BYTES:][:6], frame[VNET_HEADER_BYTES + 6 :][:6]
            self._behind[source] = port
            if self._random.random() >= self._loss:
                to = self._behind.get(destination)
                for other in [to] if to is not None else [p for p in self._ports if p is not port]:
                    self._under_way.append((now + self._delay_s, other, frame))

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            _, port, frame = self._under_way.popleft()
            try:
                port.send(frame)
            except OSError:
                continue  # the port's queue is full: a switch drops what it has no room for


def _open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # hears nothing before it is bound: first say how it is to hear
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    # Room for what the port's own queue holds: the kernel's usual 208 KiB would drop frames long before that queue is full.
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, PORT_BUFFER_BYTES)
    port.bind((name, ETH_P_ALL))
    port.setblocking(False)
    return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", nargs="+", metavar="PORT", help="network devices of the switch")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    switch = Switch(options.ports, options.delay_ms / 1e3, options.loss, options.seed)
    print("ready", flush=True)
    switch.serve()


if __name__ == "__main__":
    main()
