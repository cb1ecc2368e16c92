"""``python -m psgc.launch.job.remote``: one host's part of a job that ``psgc run --hostfile`` starts from another machine, over ssh.

stdin: a line with the order as JSON (settings, the job's secret among them, folder, command, dead_s); then a line for each signal that is to be passed on, and
empty lines as a sign of life. A spare host first gets a line with dead_s alone, and the order once it has something to run, perhaps never. The end of stdin,
or PSGC_DEAD_S of silence, ends everything here: the launcher or the connection is gone. Where the job outlives this host (``outlived`` in the order) it ends
without a word, as if the machine were lost: what members say of their end would end the job. Notes for the launcher are lines on stderr that begin with MARK.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from typing import Any, Final

from psgc import __version__
from psgc.launch.job.batch_signals import ignore_scripts
from psgc.launch.job.ranks import free_port
from psgc.launch.supervision.blame import Weight
from psgc.launch.supervision.noting_relay import MARK

LIVES: Final = 4  # signs of life that the launcher gives within PSGC_DEAD_S


def tell(event: str, **more: Any) -> None:
    """A note for the launcher."""
    sys.stderr.write(f"{MARK}{json.dumps({'event': event, **more})}\n")
    sys.stderr.flush()


class Lines:
    """What comes on a descriptor, line by line."""

    def __init__(self, fd: int = 0) -> None:
        self._fd, self._rest, self._lines = fd, b"", list[bytes]()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def next(self, within_s: float | None) -> bytes | None:
        """The next line, without its end. within_s: of silence at most; None: for ever. None: the time is over, or nothing will come any more."""
        while not self._lines:
            if not self._poll.poll(None if within_s is None else 1e3 * within_s):
                return None
            data = os.read(self._fd, 1 << 16)
            if not data:
                return None
            *self._lines, self._rest = (self._rest + data).split(b"\n")
        return self._lines.pop(0)


def main() -> None:
    ignore_scripts()
    tell("hello", version=__version__, connection=os.environ.get("SSH_CONNECTION", ""), port=_pair_of_ports(), python=sys.executable)
    lines = Lines()
    order = await_order(lines)
    sys.exit(0 if order is None else _serve(order, lines))


def await_order(lines: Lines) -> dict[str, Any] | None:
    """None: the launcher has changed its mind, or is gone."""
    dead_s: float | None = None
    while (line := lines.next(dead_s)) is not None:
        told: dict[str, Any] = json.loads(line) if line.strip() else {}
        if "command" in told:
            return told
        dead_s = told.get("dead_s", dead_s)
    return None


def _serve(order: dict[str, Any], lines: Lines) -> int:
    from psgc.launch.job.bpslaunch import launch

    os.environ.update(order["env"])
    os.environ["PATH"] = os.pathsep.join(
        [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    )  # `python` is the one that has psgc
    try:
        os.chdir(order["folder"])
    except OSError as error:
        tell(
            "end",
            weight=Weight.OWN,
            status=2,
            text=f"no folder {order['folder']} there ({error.strerror}); start the job from one that every host has, or give --chdir",
        )
        return 2
    os.environ["PWD"] = order["folder"]
    threading.Thread(target=_listen, args=(lines, order["dead_s"], order["outlived"]), daemon=True).start()

    def verdict(weight: Weight, text: str, status: int) -> None:
        tell("end", weight=weight, text=text, status=status)

    return launch(order["command"], dict(os.environ), verdict, order["prefix"])


def _listen(lines: Lines, dead_s: float, outlived: bool) -> None:
    """Pass on signals until the launcher is gone, and then end what runs here."""
    while (line := lines.next(dead_s)) is not None:
        if line.isdigit():
            os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGKILL if outlived else signal.SIGTERM)


def _pair_of_ports() -> int:
    """A free port, for the scheduler, whose next one is free, too: for torch.distributed."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("", port + 1))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    main()
