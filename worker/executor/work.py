"""What a bucket, and the executor, ask of a part, whichever way it takes: over servers (``served.py``) or over groups (``part.py``).

Owns the interface only. Invariant: a part runs one step of its program at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from psgc.errors import PsgcError
from psgc.program.groups import Groups
from psgc.program.ranks import Range
from psgc.program.steps import Decode, Encode, Program, Serve, Step, Transfer
from psgc.worker.contributions import Contribution
from psgc.worker.executor.control import Agreement
from psgc.worker.executor.location import Location
from psgc.worker.residuals.kept import EncodingPlace
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

    @property
    def agreement(self) -> Agreement:
        """What ranks agree on of each step."""

    @property
    def places(self) -> Iterator[EncodingPlace]:
        """Those that encode, and what they keep."""

    @property
    def goes_back(self) -> bool:
        """Whether a step that the trainer does not apply goes back into residuals, whose it was."""

    @property
    def moved_bytes(self) -> int:
        """What this rank has sent and received over groups."""

    @property
    def on_device(self) -> bool:
        """Whether its elements lie on a device in the step under way."""

    def begin(self, step: int, submission: Submission, location: Location, array: NDArray[Any]) -> None:
        """A step of the layout starts; the last one has been stored. array: the bucket's elements, if they lie on the host."""

    def compute(self, step: Encode | Decode, then: Callable[[PsgcError | None], None]) -> None:
        """Encode or decode, and call ``then`` once that is over, with what went wrong: at once, or in another thread where a device does it."""

    def transfer(self, step: Transfer, groups: Groups) -> int:
        """Run a step over groups. Returns the bytes that this rank has sent and received. Raises PsgcError."""

    def contribution(self, step: Serve, piece: Range, then: Callable[[int, Any], None]) -> Contribution:
        """What this rank contributes of a piece; it lies in the key's slot."""

    def take(self, step: Serve, piece: Range, flags: int, payload: Any) -> int:
        """Take a contribution's result. Returns its key. Raises PayloadError."""

    def end(self) -> None:
        """All steps are over, and what ranks agree on is known."""

    def clear(self) -> None:
        """The step, which is over, has no result of this part, but one of others of its bucket: the elements become zeros."""

    def has_result(self, first: int) -> bool:
        """Whether the step has a result of the slice that begins with this element of the bucket."""

    def span(self, step: Step) -> Span | None:
        """Of a step that is over; None: a timeline has nothing of it."""
