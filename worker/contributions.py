"""Contributions of programs to servers: what a program hands to the network thread, and what it gets back.

A part of a bucket that runs over groups of ranks may travel to servers on its way, cut into keys of which this rank pushes some. The program encodes
them itself, into slots; the network thread carries them as it carries other pushes. Owns the interface between the two, and the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from psgc.layout import Bucket, Layout, Part
from psgc.transport.memory.arena import Arena
from psgc.transport.memory.segment import Place


@dataclass(frozen=True, slots=True)
class Contribution:
    """This rank's contribution to a key's next step; its payload lies in the key's slot, and stays there until the result is taken.

    then: called once, in the network thread, with the result's flags and its payload (None: it has none), which stays as it is until
    ``Servers.taken``. The other fields are as in ``Session.submit``."""

    key: int
    payload_bytes: int
    nonfinite: bool
    previous_skipped: int
    rescale: float
    then: Callable[[int, Any], None]


class Servers(Protocol):
    """What programs ask of the network thread. Methods return at once, and may be called by any thread."""

    def slot(self, key: int) -> Place:
        """Where this rank's payloads of the key are encoded, as long as the push codec's bound."""

    def contribute(self, contribution: Contribution) -> None:
        """Begin the key's next step. The last one's result has been taken."""

    def taken(self, key: int) -> None:
        """The result has been decoded: its memory may be used again."""


class Contributions:
    """The slots of this rank's keys behind groups, and what is under way of them. Used by the network thread, which made the slots before a program
    asks for them."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.slots: dict[int, Place] = {}
        self.current: dict[int, Contribution] = {}

    def add(self, layout: Layout, rank: int) -> dict[int, int]:
        """Make slots for the layout's keys to which this rank contributes. Returns the push codecs' ids of all keys behind groups, by key."""
        ids = {}
        for bucket, key in keys_behind_groups(layout):
            push = layout.scheme(bucket).rounds(key.numel)[0].pair.push
            ids[key.key] = push.codec_id
            if rank in (key.contributors or (rank,)):
                self.slots[key.key] = self._arena.cut(push.payload_bound(key.numel))
        return ids

    def remove(self, layout: Layout) -> None:
        """Give back the memory of the layout's slots; nothing of it is under way."""
        for _, key in keys_behind_groups(layout):
            slot = self.slots.pop(key.key, None)
            if slot is not None:
                slot.release()


def keys_behind_groups(layout: Layout) -> Iterator[tuple[Bucket, Part]]:
    """Every key that a bucket of the layout has behind groups."""
    return ((bucket, key) for bucket in layout.buckets for key in bucket.keys)
