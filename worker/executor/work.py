"""What the executor asks of a bucket and of its parts, whichever way the bucket takes: over servers (``served.py``) or over groups (``bucket.py``).

Owns the interface only. Invariant: a part runs one step of its program at a time; a bucket's steps never overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from psgc.errors import PsgcError
from psgc.layout import Bucket, Layout
from psgc.program.groups import Group, Groups
from psgc.program.ranks import Range
from psgc.program.steps import Decode, Encode, Program, Serve, Step, Transfer
from psgc.worker.contributions import Contribution
from psgc.worker.submission import Submission


class Span(NamedTuple):
    """What a timeline has of a step that is over. what: an action's number, or a name of ``psgc.observe.lanes``."""

    what: int
    key: int
    nbytes: int = 0


class PartWork(Protocol):
    """A part, or a slice of a bucket in all its rounds: a chain of steps."""

    @property
    def program(self) -> Program: ...

    def compute(self, step: Encode | Decode, then: Callable[[PsgcError | None], None]) -> None:
        """Encode or decode, and call ``then`` once that is over, with what went wrong: at once, or in another thread where a device does it."""

    def transfer(self, step: Transfer, groups: Groups) -> int:
        """Run a step over groups. Returns the bytes that this rank has sent and received. Raises PsgcError."""

    def contribution(self, step: Serve, piece: Range, then: Callable[[int, Any], None]) -> Contribution:
        """What this rank contributes of a piece; it lies in the key's slot."""

    def take(self, step: Serve, piece: Range, flags: int, payload: Any) -> int:
        """Take a contribution's result. Returns its key. Raises PayloadError."""

    def span(self, step: Step) -> Span | None:
        """Of a step that is over; None: a timeline has nothing of it."""


class Work(Protocol):
    """A bucket."""

    @property
    def layout(self) -> Layout: ...

    @property
    def bucket(self) -> Bucket: ...

    @property
    def step(self) -> int:
        """The number of steps that have begun."""

    @property
    def parts(self) -> Sequence[PartWork]: ...

    @property
    def small(self) -> bool:
        """Whether the thread at hand runs the step's computations, since another would take as long to wake up."""

    @property
    def takes_gradient(self) -> bool:
        """Whether ``begin`` takes the gradient, for which it may wait."""

    @property
    def moved_bytes(self) -> int:
        """What this rank has sent and received over groups."""

    @property
    def plain_bytes(self) -> int:
        """The size of the gradients that went over groups so far."""

    def begin(self, submission: Submission, check: bool) -> str | None:
        """A step starts; the last one has been stored. check: a NaN or infinity of this rank's is an error. Returns the tensor that has one, if that is known
        already."""

    def agree(self, numbers: Iterable[int], group: Group, contributed: bool | None) -> None:
        """All ranks, which are the group, learn what any of them has met in these parts. contributed: whether some rank contributes, where a vote has told;
        nothing is exchanged then if there is nothing else to learn. Raises PsgcError."""

    def end(self, number: int) -> None:
        """All steps of a part are over."""

    def store(self) -> None:
        """All parts are through: give the aggregate to its tensors."""

    def named(self, error: PsgcError) -> PsgcError:
        """The error with the tensor that it is about."""
