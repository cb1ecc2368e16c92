"""Addresses of nodes that cannot be looked up. In clouds, and where several nodes are one machine, a node's name is no host's name: Slurm knows its NodeAddr. A
pod's name is one from when the pod has an address, and Kubernetes starts pods in any order."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Final

from psgc.processes.reminder import Reminder

SCONTROL_S: Final = 10.0
LOOK_S: Final = 1.0


def address_of(node: str) -> str:
    """``node`` itself, where that name can be looked up, else what `scontrol` says; ``node`` again where that says nothing."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return node_addr(_shown(node)) or node
    return node


def await_name(host: str, limit_s: float, silence_s: float, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
    """Return once ``host`` can be looked up, or after ``limit_s``, when whoever needs it says that it cannot. silence_s: after which ``say`` is told."""
    began = now()
    reminder = Reminder(began)
    while now() < began + limit_s:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            if reminder.due(now(), silence_s):
                say(f"waiting until DMLC_PS_ROOT_URI={host} can be looked up ({error.strerror or error}): is the scheduler's pod started?")
            time.sleep(LOOK_S)
        else:
            return


def node_addr(shown: str) -> str:
    """NodeAddr in what ``scontrol show node NAME`` prints of one node; "" if it is not there."""
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found[1] if found else ""


def _shown(node: str) -> str:
    if shutil.which("scontrol") is None:
        return ""
    try:
        done = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True, timeout=SCONTROL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
