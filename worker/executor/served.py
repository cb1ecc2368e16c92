"""A bucket that every rank pushes to servers, as programs that the executor runs: in each slice every round is encoded, then served.

What a step does to numbers is the BucketWork's. Invariant: a slice's rounds follow one another, and each has a contribution, with or without a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from psgc.codecs import Encoded
from psgc.errors import DeviceError, LocalProtocolError, PsgcError
from psgc.layout import Bucket, Layout, Part
from psgc.observe.lanes import DECODE, ENCODE
from psgc.program.groups import Group, Groups
from psgc.program.ranks import Range
from psgc.program.steps import Decode, Encode, Program, Serve, Step, Transfer
from psgc.worker.bucket import BucketWork
from psgc.worker.contributions import Contribution, Servers
from psgc.worker.executor.work import Span
from psgc.worker.session import BucketBuffer
from psgc.worker.submission import Submission

SKIPPED: Final = Encoded(0, False)
SMALL_NUMEL: Final = 16384  # a kernel takes about as long for so many elements as another thread takes to wake up


class ServedPart:
    """A PartWork: a slice of a bucket. rounds: its parts, one a round."""

    def __init__(self, work: BucketWork, rounds: Sequence[Part], rank: int) -> None:
        self._work, self._rounds = work, rounds
        whole = (0, rounds[0].numel)
        steps = ((Encode(2 * n, n, "cpu", (rank,), (whole,)), Serve(2 * n + 1, n, (whole,))) for n in range(len(rounds)))
        self.program = Program(rounds[0].numel, tuple(step for pair in steps for step in pair), len(rounds), has_servers=True)
        self._submission: Submission
        self._check = False
        self._encoded = SKIPPED  # what the round under way contributes

    def begin(self, submission: Submission, check: bool) -> None:
        """A step starts, for which the work has begun. check: as in ``Work.begin``."""
        self._submission, self._check = submission, check

    def compute(self, step: Encode | Decode, then: Callable[[PsgcError | None], None]) -> None:
        self._encoded = SKIPPED
        if self._submission.skip:
            then(None)
            return
        key = self._rounds[step.slot].key

        def encoded(found: Encoded | DeviceError) -> None:
            if isinstance(found, Encoded):
                self._encoded = found
                then(self._refused(key))
            else:
                then(found)

        self._work.encode(key, encoded)

    def _refused(self, key: int) -> PsgcError | None:
        checked = self._check and (self._encoded.nonfinite or not self._work.scheme.flags_nonfinite)
        tensor = self._work.first_nonfinite(key) if checked else None
        if tensor is None:
            return None
        what = "update" if self._work.layout.kind == "weights" else "gradient"
        return PsgcError(f"{what} of {tensor!r} holds NaN or infinity in its step {self._work.step}, and PSGC_NONFINITE=raise")

    def transfer(self, step: Transfer, groups: Groups) -> int:
        raise LocalProtocolError("a slice that all ranks push to servers has no transfers")

    def contribution(self, step: Serve, piece: Range, then: Callable[[int, Any], None]) -> Contribution:
        said, encoded = self._submission, self._encoded
        return Contribution(
            self._key(step), encoded.payload_bytes, encoded.nonfinite, said.previous_skipped, said.rescale, then, said.skip, said.priority
        )  # fmt: skip

    def take(self, step: Serve, piece: Range, flags: int, payload: Any) -> int:
        key = self._key(step)
        self._work.decode(key, flags, payload, own=not self._submission.skip and not self._encoded.nonfinite)
        return key

    def span(self, step: Step) -> Span | None:
        if isinstance(step, Serve):
            return Span(DECODE, self._key(step))
        if isinstance(step, Encode) and not self._submission.skip:
            return Span(ENCODE, self._key(step), self._encoded.payload_bytes)
        return None

    def _key(self, step: Encode | Serve) -> int:
        return self._rounds[step.slot or 0].key


def served_parts(work: BucketWork, rank: int) -> list[ServedPart]:
    """A part for each slice of the bucket."""
    slices: list[list[Part]] = []
    for part in work.bucket.parts:
        if part.round == 0:
            slices.append([])
        slices[-1].append(part)
    return [ServedPart(work, rounds, rank) for rounds in slices]


class ServedBucket:
    """A Work. numbers: what its steps work on, and what it keeps between them."""

    takes_gradient = False
    moved_bytes = plain_bytes = 0  # the network thread counts what servers get

    def __init__(self, layout: Layout, bucket: Bucket, servers: Servers, rank: int) -> None:
        self.layout, self.bucket = layout, bucket
        self.numbers = BucketWork(layout, bucket, {part.key: servers.slot(part.key) for part in bucket.parts}, rank)
        self.parts = served_parts(self.numbers, rank)
        self._buffer: BucketBuffer

    @property
    def small(self) -> bool:
        """Not in the first step, whose kernels may have to be compiled."""
        return self.step > 1 and self.bucket.numel <= SMALL_NUMEL and not self._buffer.waits

    @property
    def step(self) -> int:
        return self.numbers.step

    def begin(self, submission: Submission, check: bool) -> str | None:
        self._buffer = submission.buffer
        self.numbers.begin(submission.buffer, submission.previous_skipped, submission.rescale)
        for part in self.parts:
            part.begin(submission, check)
        return None

    def agree(self, numbers: Iterable[int], group: Group, contributed: bool | None) -> None:
        raise LocalProtocolError("a bucket that all ranks push to servers has no control words")

    def end(self, number: int) -> None:
        """Nothing is left to do."""

    def store(self) -> None:
        self.numbers.store()

    def named(self, error: PsgcError) -> PsgcError:
        return error  # it names the tensor already
