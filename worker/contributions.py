"""Contributions to servers: what the executor hands to the network thread, and what it gets back.

A key is a round of a slice that every rank pushes, or a piece that a program pushes on its way. The executor encodes it into the key's slot; the network
thread carries it. Owns the interface between the two, and the slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from psgc.codecs import Scheme
from psgc.codecs.none import NoneCodec
from psgc.codecs.scheme import PairScheme
from psgc.layout import Layout
from psgc.transport.memory.arena import Arena
from psgc.transport.memory.segment import Place

Slot = Place  # where a key's payload is encoded; it stays until the step's result has been taken


@dataclass(frozen=True, slots=True)
class Contribution:
    """This rank's contribution to a key's next step; its payload lies in the key's slot, or is ``payload``, and stays there until the result is taken.

    then: called once, in the network thread, with the result's flags and its payload (None: it has none), which stays as it is until
    ``Servers.taken``. payload, result: where servers take payloads ``in_place``, the payload where it lies, and memory of the result's length, which may be the
    same, where that may be received; nobody else writes there until ``then``. The other fields are as in ``Session.submit``."""

    key: int
    payload_bytes: int
    nonfinite: bool
    previous_skipped: int
    rescale: float
    then: Callable[[int, Any], None]
    skip: bool = False
    priority: int | None = None  # from now on, on this rank; None: as before
    payload: Any = None
    result: Any = None


class Servers(Protocol):
    """What programs ask of the network thread. Methods return at once, and may be called by any thread."""

    def slot(self, key: int) -> Place:
        """Where this rank's payloads of the key are encoded, as long as the push codec's bound."""

    def in_place(self, key: int) -> bool:
        """Whether the key's payloads may lie anywhere, and results are received where a contribution says; always the same."""

    def contribute(self, contribution: Contribution) -> None:
        """Begin the key's next step. The last one's result has been taken."""

    def taken(self, key: int) -> None:
        """The result has been decoded: its memory may be used again."""


class Contributions:
    """The slots of this rank's keys, and what is under way of them. Used by the network thread, which made the slots before anybody asks for them."""

    def __init__(self) -> None:
        self._arena = Arena("psgc-push")  # where payloads are encoded
        self._slots: dict[int, Slot] = {}
        self.current: dict[int, Contribution] = {}

    def add(self, layout: Layout, rank: int) -> dict[int, int]:
        """Make slots for the layout's keys to which this rank contributes. Returns the push codecs' ids of all its keys."""
        self._slots |= make_slots(layout, self._arena, rank)
        return {key.key: layout.scheme(bucket).rounds(key.numel)[key.round].pair.push.codec_id for bucket, key in layout.served.parts()}

    def remove(self, layout: Layout) -> None:
        """Give back the memory of the layout's slots; nothing of it is under way."""
        for _, key in layout.served.parts():
            slot = self._slots.pop(key.key, None)
            if slot is not None:
                slot.release()

    def slot(self, key: int) -> Slot:
        """Where this rank's payloads of the key are encoded."""
        return self._slots[key]

    def place(self, key: int) -> Place:
        """Where the payload under way lies."""
        payload = self.current[key].payload
        return self._slots[key] if payload is None else Place(None, 0, payload)

    def row(self, keys: Iterable[int]) -> Place | None:
        """These keys' slots as one place; None where they do not lie one behind the other without a gap, or some are not there."""
        slots = [self._slots.get(key) for key in keys]
        row = slots[0]
        for slot in slots[1:]:
            if row is None or slot is None or row.segment is not slot.segment or row.offset + row.bytes.nbytes != slot.offset:
                return None
            assert row.segment is not None
            row = Place(row.segment, row.offset, row.segment.view(row.offset, row.bytes.nbytes + slot.bytes.nbytes))
        return row

    def close(self) -> None:
        self._arena.close()


def make_slots(layout: Layout, arena: Arena, rank: int = 0) -> dict[int, Slot]:
    """By key, room for each payload that this worker pushes for ``layout``."""
    slots: dict[int, Slot] = {}
    for _, parts in itertools.groupby(layout.served.parts(), lambda part: part[0].index):
        sizes: dict[int, int] = {}
        for bucket, key in parts:
            if rank in (key.contributors or (rank,)):
                round_ = layout.scheme(bucket).rounds(key.numel)[key.round]
                initial = round_.pair.pull.payload_bound(round_.numel) if layout.kind == "weights" else 0
                sizes[key.key] = max(round_.pair.push.payload_bound(round_.numel), initial)
        slots |= zip(sizes, arena.cut_row(list(sizes.values())) if sizes else (), strict=True)
    return slots


def pushes_elements(scheme: Scheme) -> bool:
    """Whether what is pushed of a part are its elements as they are, in one round."""
    return type(scheme) is PairScheme and isinstance(scheme.pair.push, NoneCodec) and scheme.array_dtype == scheme.pair.push.array_dtype
