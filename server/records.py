"""What a key's state keeps of one step: a rank's contribution, and the result. Pure records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

NO_SLOT: Final = -1


@dataclass(slots=True)
class Contribution:
    """One rank's contribution to a step. payload None: a skip, or a non-finite part."""

    payload: Any
    skipped: bool
    nonfinite: bool
    previous_skipped: bool
    rescale: float
    raised: bool = False  # why the previous step was skipped: this rank's backward had raised
    payload_bytes: int = 0


class Result(NamedTuple):
    """A step's outcome. slot: which of the key's two result buffers holds it, NO_SLOT for one without payload."""

    step: int
    flags: int
    contributors: int
    slot: int = NO_SLOT
    payload_bytes: int = 0
