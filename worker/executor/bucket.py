"""A bucket whose option runs over groups: its parts at work, its gradient's memory, and what it keeps between steps.

It offers what ``worker/bucket.py`` offers of buckets over servers: what is remembered by tensor, so that a state can be saved and loaded in a
job with other options. Numbers only. Invariant: what is owed is added to a gradient before its parts begin, and paid once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from psgc.codecs import Stream
from psgc.codecs.scheme import PairScheme
from psgc.errors import DeviceError, PsgcError, UsageError
from psgc.layout import ITEM_BYTES, Bucket, Layout, Part
from psgc.layout.contributions import keys_of
from psgc.program.compile import compile_option
from psgc.program.groups import Group
from psgc.program.ranks import Ranks
from psgc.program.steps import same_pieces
from psgc.worker.contributions import Servers
from psgc.worker.executor.control import Control, agree
from psgc.worker.executor.lying import Whereabouts
from psgc.worker.executor.part import GroupPart
from psgc.worker.nonfinite import first_nonfinite
from psgc.worker.residuals.owed import Owed
from psgc.worker.residuals.residual import ExactResidual, TensorMemory
from psgc.worker.session import BucketBuffer
from psgc.worker.submission import Submission


class GroupBucket:
    """A Work. See the module's text."""

    small = False
    takes_gradient = True

    def __init__(
        self, layout: Layout, bucket: Bucket, ranks: Ranks, rank: int, servers: Servers | None = None, collectives: str = "host"
    ) -> None:
        """collectives: PSGC_COLLECTIVES, whether groups exchange floats from GPU to GPU."""
        self.layout, self.bucket = layout, bucket
        self.step = 0
        self.parts = _parts(layout, bucket, ranks, rank, servers)
        by_gpus = ranks.size > 1 and layout.kind == "plan"
        self._whereabouts = Whereabouts(bucket, layout.scheme(bucket), collectives if by_gpus else "host", self.first_tensor)
        # Whether a step that the trainer does not apply goes back into residuals, whose it was: what was owed is then in them.
        self._goes_back = any(
            (part.program.encodes and part.slots.pair.push.feedback) or part.slots.servers_add_back for part in self.parts
        )
        # What is paid at once of what is owed: a key, since each has or has no result by itself, or else a part.
        self._paid = [[(k.offset, k.numel) for k in keys_of(bucket, part)] or [(part.offset, part.numel)] for part in bucket.parts]
        self._kind = zlib.crc32(f"{bucket.option} {ranks.text}".encode())
        self._buffer: BucketBuffer | None = None
        self._owed: Owed | None = None

    @property
    def name(self) -> str:
        return f"{self.layout.name}/{self.bucket.index}"

    @property
    def first_tensor(self) -> str:
        return self.layout.tensors[self.bucket.tensors[0]].name

    def named(self, error: PsgcError) -> PsgcError:
        """A device's error with the tensor that it was about."""
        return DeviceError(f"gradient of {self.first_tensor!r}: {error}") if isinstance(error, DeviceError) else error

    @property
    def keeps_residual(self) -> bool:
        return any(part.slots.feedbacks for part in self.parts)

    # a step

    def begin(self, submission: Submission, check: bool = False) -> str | None:
        """A step starts; the last one has been stored. check: answer with the first tensor that holds a NaN or infinity."""
        self._buffer, skip, dropped = submission.buffer, submission.skip, submission.previous_skipped
        self.step += 1
        device, dtype, exchanged = self._whereabouts.find(submission.buffer, all(part.agreement.on_gpus for part in self.parts))
        array = submission.buffer.load() if device is None else np.empty(0, dtype)
        if check and not skip:
            first = first_nonfinite(array, self.bucket.dtype) if device is None else device.nonfinite(0, self.bucket.numel)
            if first is not None:
                return self.layout.tensor_at(self.bucket, first)
        if skip and device is None:
            array.fill(0)
        elif skip and device is not None:
            device.fill(0, self.bucket.numel, 0.0)
        if self._owed is not None and not self._owed.begin(dropped and not self._goes_back, submission.rescale):
            self._owed = None
        for part, work, paid in zip(self.bucket.parts, self.parts, self._paid, strict=True):
            if self._owed is not None and not skip:
                for lo, numel in paid:
                    if device is None:
                        self._owed.add_to(array[lo : lo + numel], lo)
                    else:
                        device.add(lo, self._owed.pay(lo, lo + numel))
            if device is None:
                work.lie_on_host(array[part.offset : part.offset + part.numel])
            else:
                work.lie_on(device, dtype)
            work.begin(self.layout.past_steps + self.step, skip, dropped, submission.rescale, exchanged)
        return None

    def agree(self, numbers: Iterable[int], group: Group, contributed: bool | None) -> None:
        parts = [self.parts[number] for number in numbers]
        if contributed is None or any(part.program.encodes for part in parts):  # only encoding meets NaNs and keeps something
            agree([part.agreement for part in parts], group)
            return
        for part in parts:
            part.agreement.agreed(Control(contributed, False, False))

    def end(self, number: int) -> None:
        """A part's control word has been agreed on."""
        work, part = self.parts[number], self.bucket.parts[number]
        work.end()
        if self._owed is not None:
            for lo, _ in self._paid[number]:
                if not work.agreement.control.contributed or work.has_none(lo - part.offset):
                    self._owed.unpaid(lo)

    def store(self) -> None:
        """All parts are through: give the aggregate to its tensors."""
        assert self._buffer is not None
        self._buffer.store(not any(work.agreement.control.contributed for work in self.parts))
        self._buffer = None

    @property
    def unapplied(self) -> bool:
        """Whether servers are still to be told that the last result was not applied: all ranks had skipped."""
        return any(work.agreement.unapplied for work in self.parts)

    @property
    def moved_bytes(self) -> int:
        """What this rank has sent and received over groups."""
        return sum(part.moved_bytes for part in self.parts)

    @property
    def plain_bytes(self) -> int:
        """The size of the gradients so far."""
        return self.step * self.bucket.numel * ITEM_BYTES[self.bucket.dtype]

    # between steps

    def remembered(self, dropped: bool = False) -> dict[str, TensorMemory]:
        """What is kept between steps, by tensor; none of its steps may be under way. dropped: the trainer did not apply the last result."""
        if not self.keeps_residual and self._owed is None:
            return {}
        values = np.zeros(self.bucket.numel, np.float32)
        for part, work in zip(self.bucket.parts, self.parts, strict=True):
            values[part.offset : part.offset + part.numel] = work.slots.remembered(dropped or work.agreement.unapplied)
        if self._owed is not None:
            values += self._owed.left(dropped and not self._goes_back)
        return {name: TensorMemory(values[place].copy()) for name, place in self.tensor_places()}

    def remember(self, memories: Mapping[str, TensorMemory]) -> None:
        """Go on from what was remembered of these tensors, by whatever option: it is owed to the first gradient, which is encoded with it."""
        values = np.zeros(self.bucket.numel, np.float32)
        for name, place in self.tensor_places():
            memory = memories.get(name, TensorMemory())
            if memory.residual is not None:
                values[place] = memory.residual
        self._owed = Owed(values) if values.any() else None

    @property
    def exact_place(self) -> str:
        """Where a saved state has what ``exact`` gives: another option, or nodes of other sizes, keep it elsewhere."""
        return f"group {self.bucket.index} {self._kind:08x}"

    def exact(self, dropped: bool = False) -> dict[int, ExactResidual]:
        """Of each slot and piece what it keeps: ``remembered`` has the sum of all slots."""
        if self._owed is not None:
            return {}
        kept = [each for part in self.parts for each in part.slots.exact(dropped or part.agreement.unapplied)]
        return {number: ExactResidual(rescale, values.view(np.uint8)) for number, (values, rescale) in enumerate(kept)}

    def set_exact(self, residuals: Mapping[int, ExactResidual]) -> None:
        """Go on from the ``exact`` of a bucket with the same slots, in place of what is owed; called after ``remember``."""
        feedbacks = [feedback for part in self.parts for feedback in part.slots.feedbacks]
        fit = residuals.keys() == set(range(len(feedbacks)))
        if not feedbacks or not fit or any(residuals[n].bytes.size != 4 * each.numel for n, each in enumerate(feedbacks)):
            return
        for number, feedback in enumerate(feedbacks):
            feedback.restore(residuals[number].bytes.view(np.float32), residuals[number].rescale)
        self._owed = None

    def server_parts(self) -> list[Part]:
        """The keys of which servers keep a residual; not of this rank's alone."""
        return list(self.bucket.keys) if any(part.slots.pair.pull.feedback for part in self.parts) else []

    def tensor_places(self) -> Iterator[tuple[str, slice]]:
        """Where each tensor's elements lie in the bucket."""
        return self.layout.places(self.bucket)


def _parts(layout: Layout, bucket: Bucket, ranks: Ranks, rank: int, servers: Servers | None) -> list[GroupPart]:
    """Compile the bucket's option for each part. Raises UsageError where its codec cannot run so."""
    scheme, option = layout.scheme(bucket), " ".join(bucket.option)
    if type(scheme) is not PairScheme:
        raise UsageError(f"codec {scheme.canonical} runs over servers alone, not by {option}; choose another codec or option")
    pair, divisor = scheme.pair, ranks.size if layout.mean and not bucket.keys else 1  # servers divide
    stream = Stream(layout.seed, 0, rank, bucket.index, 0, layout.number)
    parts: list[GroupPart] = []
    for number, part in enumerate(bucket.parts):
        programs = compile_option(bucket.option, part.numel, ranks, layout.root if layout.kind == "broadcast" else bucket.index + number)
        program, again = programs[rank], same_pieces(programs)
        if pair.pull.of_sums and pair.push.unbiased and not all(again.values()):
            raise UsageError(
                f"codec {scheme.canonical} of the bucket of {layout.tensors[bucket.tensors[0]].name!r} keeps no residual, and {option} "
                f"encodes again in other pieces, which would make its mean wrong; choose ef=1, or another option"
            )
        every = {(k.offset - part.offset, k.offset - part.offset + k.numel): k.key for k in keys_of(bucket, part)}
        keys = {piece: every[piece] for piece in program.served}
        places = {} if servers is None else {piece: servers.slot(key) for piece, key in keys.items()}
        own = replace(stream, first=part.offset)
        parts.append(GroupPart(program, pair, bucket.dtype, part.key, own, divisor, again, keys, places))
    return parts
