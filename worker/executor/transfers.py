"""The collectives of a part: of its floats in place, and of its payloads, over the hosts' memory or from GPU to GPU.

Invariant: all members of a group choose between the two alike, by what ranks agreed on in the last step and by what groups answer all members alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from psgc.program.groups import DeviceGroup, Group, Groups
from psgc.program.ranks import Range
from psgc.program.steps import Exchange, Piece, Program, Raw, Transfer
from psgc.worker.device import DeviceBucket, bytes_of
from psgc.worker.executor.control import Agreement
from psgc.worker.executor.numbers import Bytes, Numbers, Payload
from psgc.worker.executor.slots import Slots

_LENGTH: Final = np.dtype(np.int32)


class Transfers:
    """divisor: what a sum over all ranks is divided by before it is rounded (``divided_sum``). moved_bytes: payloads and slices that this rank has sent and
    received."""

    def __init__(self, program: Program, rank: int, numbers: Numbers, slots: Slots, agreement: Agreement, divisor: int) -> None:
        self._rank, self._numbers, self._slots, self._agreement = rank, numbers, slots, agreement
        self._divides, self._divisor = divided_sum(program), divisor
        self.device: DeviceBucket | None = None  # where this rank's gradient lay when it last said so to the others
        self._through_hosts: set[int] = set()  # actions whose payloads are encoded and decoded on GPUs that are not connected
        self.moved_bytes = 0

    def on_gpus(self, transfer: Transfer) -> bool:
        """Whether all that the transfer moves are payloads that go from GPU to GPU."""
        payloads = all(isinstance(one, Exchange) and one.on_gpu for one in transfer.collectives if len(one.members) > 1)
        return payloads and self._agreement.on_gpus and transfer.action not in self._through_hosts

    def run(self, transfer: Transfer, groups: Groups) -> None:
        """Run the transfer's collectives, one after the other."""
        action = transfer.action
        for number, one in enumerate(transfer.collectives):
            wanted = self._agreement.on_gpus and len(one.members) > 1 and (isinstance(one, Raw) or one.on_gpu)
            on_gpus = groups.on_device(one.members, self.device) if wanted else None
            if wanted and on_gpus is None and isinstance(one, Exchange):
                self._through_hosts.add(action)
            if isinstance(one, Raw):
                self._raw(one, groups, on_gpus)
            elif on_gpus is not None:
                self._exchange_on_gpus(one, on_gpus, action, number)
            else:
                self._exchange(one, groups.group(one.members), action, number)

    # floats

    def _raw(self, raw: Raw, groups: Groups, on_gpus: DeviceGroup | None) -> None:
        numbers, (lo, hi) = self._numbers, raw.region
        cuts = [cut - lo for cut in raw.cuts]
        divisor = self._divisor if raw == self._divides else 1
        self.moved_bytes += _moved(raw, raw.members.index(self._rank), numbers.array[lo:hi].nbytes)
        if on_gpus is not None and numbers.device is not None:
            numbers.to_device()
            on_gpus.raw(numbers.device, *numbers.in_bucket(raw.region), raw.op, cuts, raw.root, divisor)
            return
        numbers.to_host()
        array, dtype = numbers.array[lo:hi], numbers.dtype
        if on_gpus is not None:
            on_gpus.raw_array(array, dtype, raw.op, cuts, raw.root, divisor)
            return
        group = groups.group(raw.members)
        if raw.op == "all_reduce":
            group.all_reduce(array, dtype)
        elif raw.op == "reduce":
            group.reduce(array, dtype, raw.root)
        elif raw.op == "broadcast":
            group.broadcast(array, dtype, raw.root)
        elif raw.op == "reduce_scatter":
            group.reduce_scatter(array, dtype, cuts, divisor)
        else:
            group.all_gather(array, dtype, cuts)

    # payloads

    def _exchange_on_gpus(self, exchange: Exchange, group: DeviceGroup, action: int, number: int) -> None:
        assert self._numbers.device is not None
        own = exchange.members.index(self._rank)
        outgoing = [list(zip(self._sent(pieces), self._bounds(pieces), strict=True)) for pieces in exchange.sends]
        coming = [[] if member == own else self._bounds(pieces) for member, pieces in enumerate(exchange.receives)]
        root = exchange.root if exchange.op == "broadcast" else 0
        came = group.exchange(self._numbers.device, (self._numbers.first, action, number), exchange.op, outgoing, coming, root)
        self.moved_bytes += sum(bound for member, each in enumerate(outgoing) if member != own for _, bound in each)
        self.moved_bytes += sum(map(sum, coming))
        self._came(exchange, own, came)

    def _exchange(self, exchange: Exchange, group: Group, action: int, number: int) -> None:
        """Payloads of known length travel one behind the other in one message; where lengths vary they are exchanged first."""
        payloads, own = self._numbers.payloads, group.index
        for piece in itertools.chain(*exchange.sends):
            payloads[piece.range] = [bytes_of(payload) for payload in payloads[piece.range]]
        fixed = all(self._slots.codec(piece.slot).fixed_size for piece in itertools.chain(*exchange.sends, *exchange.receives))
        lengths = [self._bounds(pieces) for pieces in exchange.receives] if fixed else self._lengths(exchange, group)
        outgoing: list[Bytes | None] = []
        incoming: list[Bytes | None] = []
        for member, (sends, expected) in enumerate(zip(exchange.sends, lengths, strict=True)):
            sent, total = [bytes_of(payload) for payload in self._sent(sends)], sum(expected)
            outgoing.append(_together(sent) if sent and member != own else None)
            incoming.append(self._numbers.buffer(action, number, 1 + member, total) if total and member != own else None)
        group.exchange(outgoing, incoming)
        self.moved_bytes += sum(len(payload) for payload in (*outgoing, *incoming) if payload is not None)
        came: list[list[Payload]] = []
        for buffer, expected in zip(incoming, lengths, strict=True):
            whole = np.empty(0, np.uint8) if buffer is None else buffer
            came.append([whole[end - length : end] for end, length in zip(itertools.accumulate(expected), expected, strict=True)])
        self._came(exchange, own, came)

    def _lengths(self, exchange: Exchange, group: Group) -> list[list[int]]:
        """Of the payloads that come from each member, as it tells them."""
        sent: list[Bytes | None] = []
        coming: list[Bytes | None] = []
        for member, (sends, receives) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
            lengths = [len(bytes_of(payload)) for payload in self._sent(sends)]
            count = sum(piece.payloads for piece in receives)
            away = member != group.index
            sent.append(np.array(lengths, _LENGTH).view(np.uint8) if lengths and away else None)
            coming.append(np.empty(_LENGTH.itemsize * count, np.uint8) if count and away else None)
        group.exchange(sent, coming)
        told = [[] if buffer is None else [int(length) for length in buffer.view(_LENGTH)] for buffer in coming]
        for lengths, pieces in zip(told, exchange.receives, strict=True):
            for length, bound in zip(lengths, self._bounds(pieces), strict=False):
                if not 0 <= length <= bound:
                    raise ValueError(f"a payload of {length} bytes was announced, at most {bound} are possible")
        return told

    def _sent(self, pieces: Iterable[Piece]) -> list[Payload]:
        """The payloads of these pieces, in order."""
        return [payload for piece in pieces for payload in self._numbers.payloads[piece.range]]

    def _bounds(self, pieces: Iterable[Piece]) -> list[int]:
        """The most bytes that each payload of these pieces takes."""
        sizes = ((piece, piece.range[1] - piece.range[0]) for piece in pieces)
        return [bound for piece, numel in sizes for bound in [self._slots.codec(piece.slot).payload_bound(numel)] * piece.payloads]

    def _came(self, exchange: Exchange, own: int, came: Sequence[Sequence[Any]]) -> None:
        """Go on with what has come from each member; what this rank has sent to itself has stayed."""
        arrived: dict[Range, list[Payload]] = {}
        for member, pieces in enumerate(exchange.receives):
            left = iter(self._sent(pieces) if member == own else came[member])
            for piece in pieces:
                arrived.setdefault(piece.range, []).extend(itertools.islice(left, piece.payloads))
        for piece in itertools.chain(*exchange.sends):  # pieces of the transfer's other collectives stay
            self._numbers.payloads.pop(piece.range, None)
        self._numbers.payloads |= arrived


def divided_sum(program: Program) -> Raw | None:
    """The reduce_scatter over all ranks of a program that sums nothing else and encodes nothing: it divides before it rounds, as servers do."""
    if program.encodes or any(transfer.level != "flat" for transfer in program.transfers):
        return None
    raws = [one for transfer in program.transfers for one in transfer.collectives if isinstance(one, Raw)]
    return next((raw for raw in raws if raw.op == "reduce_scatter"), None)


def _moved(raw: Raw, index: int, nbytes: int) -> int:
    """Bytes of the region that a rank sends and receives in one collective, as a ring (of reduce and broadcast: a chain) moves them."""
    members = len(raw.members)
    if members == 1:
        return 0
    if raw.op in ("reduce", "broadcast"):
        return nbytes * (1 if index == raw.root else 2)
    return 2 * nbytes * (members - 1) // members * (2 if raw.op == "all_reduce" else 1)


def _together(payloads: list[Bytes]) -> Bytes:
    return payloads[0] if len(payloads) == 1 else np.concatenate(payloads)
