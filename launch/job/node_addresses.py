"""Addresses of Slurm's nodes. In clouds, and where several nodes are one machine, a node's name is no host's name: Slurm knows its NodeAddr."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from typing import Final

SCONTROL_S: Final = 10.0


def address_of(node: str) -> str:
    """``node`` itself, where that name can be looked up, else what `scontrol` says; ``node`` again where that says nothing."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return node_addr(_shown(node)) or node
    return node


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
