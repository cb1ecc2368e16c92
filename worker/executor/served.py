"""A bucket that every rank pushes to servers, as programs that the executor runs: in each slice every round is encoded, then served.

What a step does to numbers is the BucketWork's. Invariant: a slice's rounds follow one another, and each has a contribution, with or without a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from psgc.codecs import Encoded
from psgc.errors import DeviceError, PsgcError
from psgc.layout import Part
from psgc.program.steps import Encode, Program, Serve
from psgc.worker.bucket import BucketWork
from psgc.worker.contributions import Contribution
from psgc.worker.submission import Submission

SKIPPED: Final = Encoded(0, False)


class ServedPart:
    """A slice of a bucket. rounds: its parts, one a round. raises: whether a NaN or infinity of this rank's is an error."""

    def __init__(self, work: BucketWork, rounds: Sequence[Part], rank: int, raises: bool) -> None:
        self._work, self._rounds, self._raises = work, rounds, raises
        whole = (0, rounds[0].numel)
        steps = ((Encode(2 * n, n, "cpu", (rank,), (whole,)), Serve(2 * n + 1, n, (whole,))) for n in range(len(rounds)))
        self.program = Program(rounds[0].numel, tuple(step for pair in steps for step in pair), len(rounds), has_servers=True)
        self._submission: Submission
        self._encoded = SKIPPED  # what the round under way contributes

    def begin(self, submission: Submission) -> None:
        """A step starts, for which the work has begun."""
        self._submission = submission

    def encode(self, step: Encode, then: Callable[[PsgcError | None], None]) -> None:
        """Encode a round, and call ``then`` once it is there: at once, or in another thread where the elements lie on a device."""
        self._encoded = SKIPPED
        if self._submission.skip:
            then(None)
            return

        def encoded(found: Encoded | DeviceError) -> None:
            if isinstance(found, Encoded):
                self._encoded = found
                then(self._refused(self._rounds[step.slot].key))
            else:
                then(found)

        self._work.encode(self._rounds[step.slot].key, encoded)

    def _refused(self, key: int) -> PsgcError | None:
        checked = self._raises and (self._encoded.nonfinite or not self._work.scheme.flags_nonfinite)
        tensor = self._work.first_nonfinite(key) if checked else None
        if tensor is None:
            return None
        what = "update" if self._work.layout.kind == "weights" else "gradient"
        return PsgcError(f"{what} of {tensor!r} holds NaN or infinity in its step {self._work.step}, and PSGC_NONFINITE=raise")

    @property
    def skips(self) -> bool:
        """Whether this rank has nothing to add to the step."""
        return self._submission.skip

    @property
    def payload_bytes(self) -> int:
        """Of the round under way."""
        return self._encoded.payload_bytes

    def contribution(self, step: Serve, then: Callable[[int, Any], None]) -> Contribution:
        """What this rank contributes to a round."""
        said = self._submission
        return Contribution(
            self.key(step), self._encoded.payload_bytes, self._encoded.nonfinite, said.previous_skipped, said.rescale, then, said.skip, said.priority
        )  # fmt: skip

    def take(self, step: Serve, flags: int, payload: Any) -> None:
        """A round's result. Raises PayloadError."""
        own = not self._submission.skip and not self._encoded.nonfinite
        self._work.decode(self.key(step), flags, payload, own)

    def key(self, step: Encode | Serve) -> int:
        """Of the step's round."""
        return self._rounds[step.slot or 0].key


def served_parts(work: BucketWork, rank: int, raises: bool) -> list[ServedPart]:
    """A part for each slice of the bucket."""
    slices: list[list[Part]] = []
    for part in work.bucket.parts:
        if part.round == 0:
            slices.append([])
        slices[-1].append(part)
    return [ServedPart(work, rounds, rank, raises) for rounds in slices]
