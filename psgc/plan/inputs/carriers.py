"""What a carrier costs beside the link that it uses: fixed times of its operations, and the rate at which it moves bytes where the link is faster.

    "carriers": {"tcp": {"lone_us": 100, "each_us": 30, "gbps": 12.5},      pushes to servers and pulls from them: over TCP, and through shared memory
                 "shm": {...},
                 "sockets": {"lone_us": 300, "each_us": 300, "peer_us": 20},   collectives through hosts' memory: between nodes, and within one
                 "memory": {...},
                 "nccl": {...}}                                             collectives from GPU to GPU

An operation is one part's push, pull or collective. Owns the table's form in a profile, and what older profiles say in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from psgc.errors import UsageError
from psgc.plan.inputs.documents import is_number, shown

TCP, SHM, SOCKETS, MEMORY, NCCL = "tcp", "shm", "sockets", "memory", "nccl"
CARRIERS: Final = (TCP, SHM, SOCKETS, MEMORY, NCCL)
OLDER: Final = {"gloo": SOCKETS}  # what profiles say that were measured while collectives between nodes were gloo's
OVERHEADS: Final = ("part_us", "next_part_us", "collective_us", "collective_within_us")  # of profiles without the table


@dataclass(frozen=True, slots=True)
class CarrierCosts:
    """lone_us: fixed microseconds of an operation while nothing else is under way, besides latencies; each_us: those of them for which it keeps the threads
    that handle messages busy, so what each further operation adds; peer_us: what a collective adds to both for each member beyond the second; gbps: the rate
    at which a core at either end moves bytes, 1e9 bit/s."""

    lone_us: float = 0.0
    each_us: float = 0.0
    peer_us: float = 0.0
    gbps: float = math.inf

    @property
    def us_per_byte(self) -> float:
        return 8e-3 / self.gbps

    @property
    def late_us(self) -> float:
        """Microseconds by which a lone operation is later than its threads' work."""
        return max(0.0, self.lone_us - self.each_us)

    def with_members(self, members: int) -> CarrierCosts:
        """The costs of a collective of so many members."""
        more = self.peer_us * max(0, members - 2)
        return CarrierCosts(self.lone_us + more, self.each_us + more, self.peer_us, self.gbps)

    def to_json(self) -> dict[str, float]:
        """Without what costs nothing."""
        found = {"lone_us": self.lone_us, "each_us": self.each_us, "peer_us": self.peer_us}
        rate = {} if math.isinf(self.gbps) else {"gbps": self.gbps}
        return {name: value for name, value in found.items() if value} | rate


FREE: Final = CarrierCosts()


def read_carriers(table: Any, source: str) -> dict[str, CarrierCosts]:
    """The carriers of a profile's table. Raises UsageError, which names ``source`` and the field."""
    if not isinstance(table, Mapping):
        raise UsageError(f"{source}: carriers: expected an object, got {shown(table)}")
    found = {}
    for told, entry in table.items():
        name = OLDER.get(told, told)
        place = f"{source}: carriers.{told}"
        if name not in CARRIERS:
            raise UsageError(f"{source}: carriers: unknown carrier {name!r}; expected some of {', '.join(CARRIERS)}")
        if not isinstance(entry, Mapping):
            raise UsageError(f"{place}: expected an object, got {shown(entry)}")
        for key, value in entry.items():
            if key not in CarrierCosts.__dataclass_fields__:
                raise UsageError(f"{place}: unknown field {key!r}; expected some of {', '.join(CarrierCosts.__dataclass_fields__)}")
            if not is_number(value, above=key == "gbps"):
                raise UsageError(f"{place}.{key} is {shown(value)}, expected a number {'above' if key == 'gbps' else 'of at least'} 0")
        found[name] = CarrierCosts(**{key: float(value) for key, value in entry.items()})
    return found


def carriers_of_overheads(overheads: Mapping[str, float]) -> dict[str, CarrierCosts]:
    """What the fixed times of an older profile say of carriers. ``part_us`` is of a lone part over servers, there and back, ``next_part_us`` of each further
    one; ``collective_us`` and ``collective_within_us`` are of a collective through hosts' memory, between nodes and within one."""
    found = {}
    if "part_us" in overheads or "next_part_us" in overheads:
        lone, each = (overheads.get(name, 0.0) / 2 for name in ("part_us", "next_part_us"))
        found[TCP] = found[SHM] = CarrierCosts(max(lone, each), each)
    for carrier, name in ((SOCKETS, "collective_us"), (MEMORY, "collective_within_us")):
        if name in overheads:
            found[carrier] = CarrierCosts(overheads[name], overheads[name])
    return found
