"""What a server does not do before its standby, on another machine, has what was committed. Pure: knows neither connections nor memory.

A result that has left is on the standby, and so is whatever it was made of: a machine that is lost takes nothing with it that a worker has heard of. Per key:
while something that was committed of it is under way to the standby, nothing of the key is sent, and nothing is written to its memory, from where it is sent.

Invariants: effects of a key are released in the order in which they came; marks are acknowledged in their order; what was under way on a connection that broke
is under way until all of the next one's first sending has come. What a connection is sent first is sent key by key, each as it then is, and meanwhile whatever
is committed joins it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from psgc.server.state import Effect, Fold, Retire, Send, SendResidual
from psgc.wire.frames import Kind

OF_KEYS: Final = (Kind.ACK, Kind.RESULT, Kind.RESTORE)  # other answers to workers say nothing of what was committed


@dataclass(slots=True)
class Held:
    """See the module's text. A mark is a number that is sent behind what was committed, and acknowledged by the standby."""

    up: bool = False  # whether there is a connection, to which all has been sent
    _rest: dict[int, None] | None = None  # keys of which the connection has not been sent yet what is kept; None: there is no connection
    _mark: int = 1  # the last one
    _done: int = 0  # the last one that was acknowledged
    _all: int = 1  # behind all that the connection is sent first, or that the next one will be
    _of_key: dict[int, int] = field(default_factory=dict)  # behind what was last committed of it
    _waiting: dict[int, list[Effect]] = field(default_factory=dict)  # by mark

    @property
    def connection(self) -> bool:
        """Whether there is a connection."""
        return self._rest is not None

    def connected(self, keys: Iterable[int]) -> None:
        """There is a connection. keys: all of which the server keeps something."""
        self._rest = dict.fromkeys(keys)

    def disconnected(self) -> None:
        """What was under way may be lost."""
        self._rest = None
        self._begin_anew()

    def taken_up(self, keys: Iterable[int]) -> None:
        """This process has found what a former one has kept of these keys, all of which the standby may lack."""
        self._begin_anew()
        if self._rest is not None:
            self._rest.update(dict.fromkeys(keys))

    def _begin_anew(self) -> None:
        if self.up:
            self.up = False
            self._mark += 1
            self._all = self._mark

    def next_key(self) -> int | None:
        """The next key of which all that is kept is to be sent, on a connection; None if there is none left: then comes ``all_sent``."""
        if not self._rest:
            return None
        key = next(iter(self._rest))
        del self._rest[key]
        return key

    def all_sent(self) -> int:
        """Of each key what is kept has been sent. Returns the mark to be sent behind that."""
        self.up = True
        return self._all

    def committed(self, key: int) -> int | None:
        """Something of the key was committed. Returns the mark to be sent behind it, or None where it will be sent before ``all_sent``."""
        if not self.up:
            self._of_key[key] = self._all
            if self._rest is not None:
                self._rest[key] = None
            return None
        self._mark += 1
        self._of_key[key] = self._mark
        return self._mark

    def holds(self, effect: Effect) -> bool:
        """Whether the effect must wait; it is then among those that ``acknowledged`` returns some day."""
        mark = self._before(effect)
        if mark <= self._done:
            return False
        self._waiting.setdefault(mark, []).append(effect)
        return True

    def _before(self, effect: Effect) -> int:
        """The mark that must be acknowledged before the effect."""
        if isinstance(effect, Fold):
            return self._last(effect.key)
        if isinstance(effect, SendResidual) or (isinstance(effect, Send) and effect.header.kind in OF_KEYS):
            return self._last(effect.header.key)
        if isinstance(effect, Retire) or (isinstance(effect, Send) and effect.header.kind == Kind.WINDOW):
            return self._mark  # a window has grown by what was committed, of whichever key
        return 0

    def _last(self, key: int) -> int:
        return max(self._of_key.get(key, 0), self._all)

    def acknowledged(self, mark: int) -> list[Effect]:
        """The standby has everything that was sent before the mark. Returns what may be done now."""
        self._done = max(self._done, mark)
        return [effect for ready in sorted(m for m in self._waiting if m <= self._done) for effect in self._waiting.pop(ready)]

    @property
    def waiting(self) -> bool:
        """Whether something waits for the standby."""
        return bool(self._waiting)

    def let_go(self) -> list[Effect]:
        """There is no standby any more. Returns all that has waited."""
        return self.acknowledged(self._mark)
