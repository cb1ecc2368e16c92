"""``python -m psgc.launch.job.remote``: one host's part of a job that ``psgc run --hostfile`` starts from another machine, over ssh.

stdin: a line with the order as JSON (settings, the job's secret among them, folder, command, dead_s); then a line for each signal that is to be passed on, and
empty lines as a sign of life. Its end, or PSGC_DEAD_S of silence, ends everything here: the launcher or the connection is gone. Notes for the launcher are
lines on stderr that begin with MARK.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
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


def main() -> None:
    ignore_scripts()
    tell("hello", version=__version__, connection=os.environ.get("SSH_CONNECTION", ""), port=_pair_of_ports(), python=sys.executable)
    order_line = sys.stdin.readline()
    if not order_line.endswith("\n"):
        sys.exit(0)  # the launcher has changed its mind
    sys.exit(_serve(json.loads(order_line)))


def _serve(order: dict[str, Any]) -> int:
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
    threading.Thread(target=_listen, args=(order["dead_s"],), daemon=True).start()

    def verdict(weight: Weight, text: str, status: int) -> None:
        tell("end", weight=weight, text=text, status=status)

    return launch(order["command"], dict(os.environ), verdict, order["prefix"])


def _listen(dead_s: float) -> None:
    """Pass on signals until the launcher is gone, and then end what runs here."""
    heard = time.monotonic()
    rest = b""
    while time.monotonic() < heard + dead_s:
        if not select.select([0], [], [], dead_s / LIVES)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            break
        heard = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.isdigit():
                os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)


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
