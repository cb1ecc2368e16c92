"""The names in a timeline: the lanes and tasks that a job shares with the simulator, and a few that only a job has.

Pure. A test compares the names with ``psgc.plan.model``, which training scripts do not import because it has kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

BACKWARD: Final = "backward"
CPU: Final = "cpu"
INTRA: Final = "intra"
SEND: Final = "inter-send"
RECEIVE: Final = "inter-receive"
SERVER: Final = "server"
# Only a job has these: ranks agree on what a step met, and the training thread waits for means.
CONTROL: Final = "control"
WAITING: Final = "waiting"
LANES: Final = (BACKWARD, CPU, INTRA, SEND, RECEIVE, SERVER, CONTROL, WAITING)


class Line(IntEnum):
    """The recorded resource that was busy. A collective of all ranks may hold several lanes."""

    BACKWARD = 0
    CPU = 1
    SEND = 2
    RECEIVE = 3
    SERVER = 4
    INTRA = 5
    INTER = 6
    FLAT = 7
    CONTROL = 8
    WAITING = 9


_ONE: Final = {
    Line.BACKWARD: BACKWARD, Line.CPU: CPU, Line.SEND: SEND, Line.RECEIVE: RECEIVE, Line.SERVER: SERVER, Line.INTRA: INTRA,
    Line.CONTROL: CONTROL, Line.WAITING: WAITING,
}  # fmt: skip
COLLECTIVES: Final = frozenset((Line.INTRA, Line.INTER, Line.FLAT, Line.CONTROL))


def lanes_of(line: int, node_sizes: Sequence[int]) -> tuple[str, ...]:
    """The lanes that a span on this line holds in a job with these nodes, by the simulator's rule."""
    if line in _ONE:
        return (_ONE[Line(line)],)
    if line == Line.INTER:
        return SEND, RECEIVE
    if len(node_sizes) == 1:
        return (INTRA,)
    return (SEND, RECEIVE) if max(node_sizes) == 1 else (INTRA, SEND, RECEIVE)


# Actions of buckets over servers, and of none. Smaller numbers are places in a bucket's option.
ENCODE, PUSH, PULL, DECODE, READY, WAIT = range(0xFF00, 0xFF06)
# Their tasks' names where a bucket is encoded, and where it is not.
_ENCODED: Final = {ENCODE: "comp@cpu", PUSH: "flat.push.c", PULL: "flat.pull.c", DECODE: "decomp@cpu"}
_PLAIN: Final = {ENCODE: "flat.push", PUSH: "flat.push", PULL: "flat.pull", DECODE: "flat.pull"}
_SIGNS: Final = {ENCODE: "comp@", PUSH: ".push", PULL: ".pull", DECODE: "decomp@"}
_OTHERS: Final = {READY: BACKWARD, WAIT: "wait"}
CONTROL_WORD: Final = "control word"


class Described(NamedTuple):
    """A bucket in words. tensor: the name of its first tensor."""

    tensor: str
    tensors: int
    numel: int
    codec: str
    option: tuple[str, ...] = ()

    def action(self, action: int) -> str:
        """A task's name."""
        if action in _OTHERS:
            return _OTHERS[action]
        if action >= ENCODE and self.option:  # a bucket over servers behind sums within nodes
            return next((own for own in self.option if _SIGNS[action] in own), _ENCODED[action])
        if action >= ENCODE:
            return (_PLAIN if self.codec == "none" else _ENCODED)[action]
        return self.option[action] if action < len(self.option) else CONTROL_WORD
