"""A rank's bucket over servers, without servers: a test encodes each round, looks at the contribution, and gives it a result."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from psgc.errors import DeviceError, PsgcError
from psgc.layout import Bucket, Layout, Part
from psgc.program.steps import Encode, Serve
from psgc.transport.memory.arena import Arena
from psgc.worker.contributions import Contribution, Slot, make_slots
from psgc.worker.executor.bucket import over_servers
from psgc.worker.executor.work import PartWork
from psgc.worker.session import BucketBuffer
from psgc.worker.submission import Submission
from psgc.worker.tickets import TicketBoard


class _Slots:
    """In place of servers."""

    def __init__(self, slots: Mapping[int, Slot], in_place: bool) -> None:
        self._slots, self._in_place = slots, in_place

    def slot(self, key: int) -> Slot:
        return self._slots[key]

    def in_place(self, key: int) -> bool:
        return self._in_place

    def contribute(self, contribution: Contribution) -> None:
        raise AssertionError("nothing is sent")

    def taken(self, key: int) -> None:
        raise AssertionError("nothing comes")


class ServedBucket:
    def __init__(
        self, layout: Layout, bucket: Bucket, rank: int = 0, arena: Arena | None = None, in_place: bool = False,
        slots: Mapping[int, Slot] | None = None,
    ) -> None:  # fmt: skip
        self._servers = _Slots(slots or make_slots(layout, arena or Arena("test")), in_place)
        self.layout, self.bucket, self.scheme = layout, bucket, layout.scheme(bucket)
        self.work = over_servers(layout, bucket, self._servers, rank)
        self.kept = self.work.kept

    def begin(
        self, buffer: BucketBuffer, dropped: bool = False, rescale: float = 1.0, skip: bool = False, check: bool = False, priority: int | None = None
    ) -> None:  # fmt: skip
        submission = Submission(buffer, TicketBoard().issue(), skip, int(dropped), rescale, priority)
        with self._named(0):
            self.work.begin(submission, check)

    def encode(self, part: Part) -> Contribution:
        """Encode a round, and return what it contributes. Raises what the encoding has met."""
        number, over, met = self._number(part), threading.Event(), list[PsgcError | None]()

        def then(fault: PsgcError | None) -> None:
            met.append(fault)
            over.set()

        step = self._step(number, Encode, part.round)
        with self._named(number):
            self.work.parts[number].compute(step, then)
            assert over.wait(100.0)
            if met[0] is not None:
                raise met[0]
        serve = self._step(number, Serve, part.round)
        return self.work.parts[number].contribution(serve, serve.pieces[0], lambda *_: None)

    def decode(self, part: Part, flags: int, payload: Any) -> None:
        """The round's result."""
        number = self._number(part)
        serve = self._step(number, Serve, part.round)
        with self._named(number):
            assert self.work.parts[number].take(serve, serve.pieces[0], flags, payload) == part.key
        if part.round == max(one.round for one in self.bucket.parts):
            self.work.end(number)

    def store(self) -> None:
        self.work.store()

    def payload(self, part: Part, nbytes: int) -> Any:
        """A copy of what lies in the round's slot."""
        return self._servers.slot(part.key).bytes[:nbytes].copy()

    def of(self, part: Part) -> PartWork:
        return self.work.parts[self._number(part)]

    @contextmanager
    def _named(self, number: int) -> Iterator[None]:
        """As the executor does."""
        try:
            yield
        except DeviceError as error:
            raise self.work.with_tensor(error, number) from error

    def _number(self, part: Part) -> int:
        return next(n for n, one in enumerate(p for p in self.bucket.parts if p.round == 0) if one.offset == part.offset)

    def _step(self, number: int, kind: Any, round_: int) -> Any:
        return next(s for s in self.work.parts[number].program.steps if isinstance(s, kind) and s.slot == round_)
