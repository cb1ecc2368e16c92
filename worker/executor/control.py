"""The control word of a part's step: what this rank has met, and what all ranks agree on.

Invariant: ``Agreement.control`` is this rank's own while the step runs, and every rank's alike once they have agreed, until the next step begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psgc.errors import DeviceError, PsgcError, raised_alone
from psgc.program.groups import Group
from psgc.worker.session import RAISED


@dataclass(slots=True)
class Control:
    """What ranks agree on at the end of a step."""

    contributed: bool
    nonfinite: bool
    previous_skipped: bool
    on_host: bool = True  # some rank's gradient does not lie on a GPU, or is to be exchanged through the host's memory
    disagreed: bool = False  # some rank's trainer applied the last step, and another's did not
    raised: int = -1  # the rank, or the last of those, whose trainer did not since its backward had raised

    def word(self) -> NDArray[np.int32]:
        """The word whose maximum over the ranks is taken."""
        flags = self.contributed, self.nonfinite, self.previous_skipped, not self.previous_skipped, self.on_host
        return np.array([*flags, self.raised], np.int32)

    @classmethod
    def of(cls, word: NDArray[np.int32]) -> Control:
        contributed, nonfinite, skipped, applied, on_host = (bool(value) for value in word[:-1])
        return cls(contributed, nonfinite, skipped, on_host, skipped and applied, int(word[-1]))


class Agreement:
    """See the module's text. has_servers: whether the program pushes to servers."""

    def __init__(self, rank: int, has_servers: bool) -> None:
        self._rank, self._has_servers = rank, has_servers
        self.control = Control(False, False, False)
        # Whether each rank's gradient lay on a GPU in the last step: the floats of this step go from GPU to GPU, where they can.
        self.on_gpus = False
        # The last result was not given to the trainer since all ranks had skipped; servers, to which they pushed zeros, are to be told with the next push.
        self.unapplied = False
        self._told = threading.Condition()
        self._unreported = 0  # encodes on the device of which the host does not know yet whether they met a NaN or infinity
        self._fault: DeviceError | None = None  # in finding that out

    def begin(self, skip: bool, previous_skipped: int, on_host: bool) -> int:
        """A step starts. Returns whether the last one counts as not applied: the trainer's word (RAISED: as in ``Session.submit``), or ``unapplied``."""
        raised = self._rank if previous_skipped == RAISED else -1
        self.control = Control(not skip, False, bool(previous_skipped), on_host, raised=raised)
        dropped, self.unapplied = previous_skipped or self.unapplied, False
        return dropped

    def awaited(self) -> Callable[[bool | DeviceError], None]:
        """What a device calls, in another thread, to say whether it has met a NaN or infinity; ``word`` waits for that."""
        with self._told:
            self._unreported += 1
        return self._tell

    def _tell(self, nonfinite: bool | DeviceError) -> None:
        with self._told:
            if isinstance(nonfinite, DeviceError):
                self._fault = nonfinite
            elif nonfinite:
                self.control.nonfinite = True
            self._unreported -= 1
            self._told.notify_all()

    def word(self) -> NDArray[np.int32]:
        """What this rank has met. Raises DeviceError where its device cannot say."""
        with self._told:
            self._told.wait_for(lambda: not self._unreported)
            if self._fault is not None:
                raise self._fault
        return self.control.word()

    def agreed(self, control: Control) -> None:
        """The ranks have agreed on this. Raises PsgcError where their trainers disagree."""
        self.control = control
        self.on_gpus = not control.on_host
        self.unapplied = not control.contributed and self._has_servers
        if control.disagreed and control.raised >= 0:
            raise PsgcError(raised_alone(control.raised, "the step before"))
        if control.disagreed:
            raise PsgcError("some ranks applied the last step and others did not; give every rank the same loss scaler")


def agree(agreements: Sequence[Agreement], group: Group) -> None:
    """All ranks learn what any of them has met, in one exchange of these parts' words. Raises as ``word`` and ``agreed`` do."""
    words = np.concatenate([each.word() for each in agreements])
    group.maximum(words)
    for each, word in zip(agreements, np.split(words, len(agreements)), strict=True):
        each.agreed(Control.of(word))
