"""What a worker has asked of the scheduler: layouts, barriers, turns, and values that ranks publish and look up.

Runs in the network thread. Invariant: what is unanswered is said again on a new connection, since the old one may have lost it; the scheduler counts none
of it twice, and the answer to a request that is not there any more is one to a request that was said again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from psgc.layout import Declaration, Layout
from psgc.layout.speed import Speed
from psgc.program.agenda import Agenda, Turn, Use
from psgc.wire.counts import cut, whole
from psgc.wire.frames import Kind
from psgc.wire.messages import Declare, Lookup, Published, encode_body, pack


class Send(Protocol):
    def __call__(self, kind: Kind, body: bytes = b"", *, plan: int = 0, key: int = 0, step: int = 0) -> None:
        """Send a message to the scheduler."""


@dataclass(slots=True)
class _Declared:
    """A declared name that has no layout yet. digest: the message's body; speed: as in ``Requests.declare``; then: who waits for the layout."""

    request: int
    declaration: Declaration
    digest: bytes
    speed: Speed
    then: list[Callable[[Layout], None]] = field(default_factory=list)


@dataclass(slots=True)
class _Lookup:
    """A published value that has been asked for and has not come. body: the message's; then: who waits for the value."""

    request: int
    body: bytes
    then: list[Callable[[bytes], None]] = field(default_factory=list)


class Requests:
    """See the module's text."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._count = 0  # of the requests that have a number
        self._declared: dict[str, _Declared] = {}
        self._by_request: dict[int, _Declared] = {}
        self._published: dict[int, bytes] = {}  # bodies by request, until the scheduler says that it keeps them
        self._lookups: dict[str, _Lookup] = {}
        self._agenda = Agenda()
        self._barriers: dict[tuple[int, int], threading.Event] = {}  # by layout (0: none) and number
        self._state: int | None = None  # while this process needs the job's state: how many handovers have failed
        self._has_state = False  # it needed it, and has it

    def _number(self) -> int:
        self._count = cut(self._count + 1)  # that long, nobody waits for an answer
        return self._count

    def declare(self, declaration: Declaration, then: Callable[[Layout], None], speed: Speed) -> None:
        """speed: of this rank's slowest connection to a server."""
        declared = self._declared.get(declaration.name)
        if declared is None:
            digest = encode_body(Declare(declaration.name, declaration.digest(), declaration.unused, declaration.members))
            declared = self._declared[declaration.name] = _Declared(self._number(), declaration, digest, speed)
            self._by_request[declared.request] = declared
            self._send(Kind.DECLARE, declared.digest, plan=declared.request, step=speed.rate, key=speed.round_trip_us)
        declared.then.append(then)

    def declare_whole(self, request: int) -> None:
        """The scheduler asks for the whole declaration: it has only the digest."""
        declared = self._by_request.get(request)
        if declared is not None:
            self._send(Kind.DECLARATION, pack(encode_body(declared.declaration.to_json())), plan=request)

    def laid_out(self, request: int) -> list[Callable[[Layout], None]] | None:
        """The scheduler answers a declaration. Returns who waits for the layout; None: it has been answered before."""
        declared = self._by_request.pop(request, None)
        if declared is None:
            return None
        del self._declared[declared.declaration.name]
        return declared.then

    def barrier(self, number: int, passed: threading.Event, layout: int = 0) -> None:
        self._barriers[layout, number] = passed
        self._send(Kind.BARRIER, plan=layout, step=number)

    def passed(self, layout: int, number: int) -> None:
        passed = self._barriers.pop((layout, number), None)
        if passed is not None:
            passed.set()

    def release(self) -> None:
        """The job has failed: release every thread that waits for a barrier."""
        for passed in self._barriers.values():
            passed.set()
        self._barriers.clear()

    def ask_turn(self, key: int) -> None:
        """This rank has submitted the key's next step: ask for its turn."""
        self._ask_turn(self._agenda.submit(key))

    def _ask_turn(self, use: Use) -> None:
        self._send(Kind.TURN, plan=cut(self._agenda.received), key=use.key, step=use.step)

    def turns(self, number: int, use: Use) -> list[int]:
        """The scheduler tells of a turn, and its number's last bits. Returns the keys whose next steps have theirs now, in order."""
        return [use.key for use in self._agenda.told(Turn(whole(number, self._agenda.received), use))]

    def publish(self, name: str, value: bytes) -> None:
        """Have the scheduler keep a value for whoever looks it up, to the end of the job."""
        request = self._number()
        body = self._published[request] = pack(encode_body(Published.of(name, value)))
        self._send(Kind.PUBLISH, body, plan=request)

    def published(self, request: int) -> None:
        self._published.pop(request, None)

    def look_up(self, name: str, then: Callable[[bytes], None]) -> None:
        """Call ``then`` with a published value once it is there."""
        lookup = self._lookups.get(name)
        if lookup is None:
            lookup = self._lookups[name] = _Lookup(self._number(), encode_body(Lookup(name)))
            self._send(Kind.LOOKUP, lookup.body, plan=lookup.request)
        lookup.then.append(then)

    def give_up_look_up(self, name: str, then: Callable[[bytes], None]) -> None:
        """``then`` is not to be called any more. What nobody waits for is not asked for again on a new connection."""
        lookup = self._lookups.get(name)
        if lookup is not None and then in lookup.then:
            lookup.then.remove(then)
            if not lookup.then:
                del self._lookups[name]

    def looked_up(self, published: Published) -> None:
        lookup = self._lookups.pop(published.name, None)
        for then in lookup.then if lookup is not None else ():
            then(published.data)

    def ask_state(self, failed: int) -> None:
        """Ask who gives this process the job's state, until ``tell_state``."""
        self._state = failed
        self._send(Kind.STATE, plan=failed)

    def tell_state(self) -> None:
        """This process has the job's state."""
        self._state, self._has_state = None, True
        self._send(Kind.STATE, key=1)

    def ask_state_again(self) -> None:
        """The word to the rank that is to give the state may be lost with that one's connection."""
        if self._state is not None:
            self._send(Kind.STATE, plan=self._state)

    def say_again(self) -> None:
        """On a new connection: repeat what is unanswered."""
        self.ask_state_again()
        if self._has_state:
            self._send(Kind.STATE, key=1)
        for declared in self._declared.values():
            self._send(Kind.DECLARE, declared.digest, plan=declared.request, step=declared.speed.rate, key=declared.speed.round_trip_us)
        for layout, number in self._barriers:
            self._send(Kind.BARRIER, plan=layout, step=number)
        for use in self._agenda.unanswered:
            self._ask_turn(use)
        for request, body in self._published.items():
            self._send(Kind.PUBLISH, body, plan=request)
        for lookup in self._lookups.values():
            self._send(Kind.LOOKUP, lookup.body, plan=lookup.request)
