"""A bucket at work: where its gradient lies, its parts, and what it keeps between steps.

Numbers only; which step of a part runs when is the executor's. Invariant: the steps of a bucket never overlap; each begins with the gradient, to which what is
inherited is added, and ends when the aggregate is with its tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from psgc.codecs import Stream
from psgc.codecs.scheme import PairScheme
from psgc.errors import DeviceError, PsgcError, UsageError
from psgc.layout import ITEM_BYTES, Bucket, Layout
from psgc.layout.building import UNCOMPRESSED, members_of
from psgc.layout.contributions import keys_of
from psgc.layout.update_rule import UpdateRule
from psgc.program.compile import compile_option, renumbered
from psgc.program.groups import Group
from psgc.program.ranks import Ranks
from psgc.program.steps import same_pieces
from psgc.worker.contributions import Servers
from psgc.worker.executor.control import Control, agree
from psgc.worker.executor.location import OverGroups, OverServers, Whereabouts
from psgc.worker.executor.part import GroupPart
from psgc.worker.executor.served import served_parts
from psgc.worker.executor.work import PartWork
from psgc.worker.nonfinite import nonfinite_tensor
from psgc.worker.residuals.kept import Kept
from psgc.worker.session import BucketBuffer
from psgc.worker.submission import Submission

SMALL_NUMEL: Final = 16384  # a kernel takes about as long for so many elements as another thread takes to wake up
RESIDUAL_EVERY: Final = 100  # steps: two passes over a bucket in so many cost a thousandth of them
RESIDUAL_FIRST: Final = 10  # the first one looked at; buckets follow one another, so that no step looks at all
Slices = Sequence[tuple[int, int]]


class BucketWork:
    """parts: of the bucket, or its slices in all their rounds; slices: of each of these, what it adds of inherited residuals: first elements and lengths."""

    def __init__(self, parts: Sequence[PartWork], slices: Sequence[Slices], kept: Kept, where: Whereabouts) -> None:
        self.layout, self.bucket = kept.layout, kept.bucket
        self.parts, self.kept = parts, kept
        self.step = 0  # the number of steps that have begun
        self.residual_ratio: float | None = None  # the last one looked at; see ``Kept.ratio``
        self._slices, self._where = slices, where
        self._buffer: BucketBuffer | None = None

    def is_small(self, buffer: BucketBuffer) -> bool:
        """Whether the thread at hand runs the next step's computations, since another would take as long to wake up. Not in the first step, whose kernels may
        have to be compiled, nor where a device may have to be waited for, or a link."""
        return self.step > 0 and self.bucket.numel <= SMALL_NUMEL and not self.bucket.over_groups and not buffer.waits

    def tensor_of(self, number: int) -> str:
        """The first tensor of a part."""
        return self.layout.tensor_at(self.bucket, self._slices[number][0][0])

    def with_tensor(self, error: DeviceError, number: int) -> DeviceError:
        """A device's error with the tensor that it was about."""
        return DeviceError(f"gradient of {self.tensor_of(number)!r}: {error}")

    # a step

    def begin(self, submission: Submission, check: bool = False) -> None:
        """A step starts; the last one has been stored. check: a NaN or infinity of this rank's is an error. Raises PsgcError."""
        self._buffer, skip = submission.buffer, submission.skip
        self.step += 1
        location = self._where.find(submission.buffer, all(part.agreement.on_gpus for part in self.parts))
        device, array = location.device, np.empty(0, location.dtype) if location.device is not None else submission.buffer.load()
        assert device is not None or array.size == self.bucket.numel, (array.size, self.bucket)
        if check and not skip:
            if device is None:
                tensor = nonfinite_tensor(self.layout, self.bucket, array)
            else:
                first = device.nonfinite(0, self.bucket.numel)
                tensor = None if first is None else self.layout.tensor_at(self.bucket, first)
            if tensor is not None:
                what = "update" if self.layout.kind == "weights" else "gradient"
                raise PsgcError(f"{what} of {tensor!r} holds NaN or infinity in its step {self.step}, and PSGC_NONFINITE=raise")
        self.kept.begin(submission.previous_skipped, submission.rescale)
        for part, slices in zip(self.parts, self._slices, strict=True):
            part.begin(self.layout.past_steps + self.step, submission, location, array)
            if not skip:
                self.kept.add_inherited(array, device, slices)
        if device is None and not skip and (self.step + self.bucket.index) % RESIDUAL_EVERY == RESIDUAL_FIRST:
            self.residual_ratio = self.kept.ratio(array)

    def agree(self, numbers: Iterable[int], group: Group, contributed: bool | None) -> None:
        """All ranks whose bucket it is, which are the group, learn what any of them has met in these parts. contributed: whether some rank
        contributes, where a vote has told; nothing is exchanged then if there is nothing else to learn. Raises PsgcError."""
        parts = [self.parts[number] for number in numbers]
        if contributed is None or any(part.program.encodes for part in parts):  # only encoding meets NaNs and keeps something
            agree([part.agreement for part in parts], group)
            return
        for part in parts:
            part.agreement.agreed(Control(contributed, False, False))

    def end(self, number: int) -> None:
        """All steps of a part are over, and what ranks agree on is known."""
        part, inherited = self.parts[number], self.kept.inherited
        part.end()
        for lo, _ in self._slices[number] if inherited is not None else ():
            if inherited is not None and not part.has_result(lo):
                inherited.keep(lo)

    def store(self) -> None:
        """All parts are through: give the aggregate to its tensors."""
        assert self._buffer is not None
        without = [part for part in self.parts if not part.agreement.control.contributed]
        skipped = len(without) == len(self.parts)
        if not skipped:  # of some parts: all ranks have skipped, and what had come late is in the sums of the others
            for part in without:
                part.clear()
        self._buffer.store(skipped)
        self._buffer = None

    @property
    def unapplied(self) -> bool:
        """Whether servers are still to be told that the last result was not applied: all ranks had skipped."""
        return any(part.agreement.unapplied for part in self.parts)

    @property
    def codec(self) -> str:
        """By which its gradients travel: none where its option encodes nothing."""
        return self.bucket.codec if any(part.program.encodes for part in self.parts) else UNCOMPRESSED

    @property
    def moved_bytes(self) -> int:
        """What this rank has sent and received over groups."""
        return sum(part.moved_bytes for part in self.parts)

    @property
    def plain_bytes(self) -> int:
        """What a ring of the ranks whose bucket it is would have moved so far, each way, uncompressed, of the gradients that went over groups."""
        ranks, nbytes = self.layout.counted(self.bucket), self.step * self.bucket.numel * ITEM_BYTES[self.bucket.dtype]
        return 4 * nbytes * (ranks - 1) // ranks if self.bucket.over_groups else 0


def over_servers(layout: Layout, bucket: Bucket, servers: Servers, rank: int) -> BucketWork:
    """A bucket that every rank pushes to servers. Raises CodecError."""
    scheme = layout.scheme(bucket)
    parts = served_parts(layout, bucket, servers, rank)
    slices = [(part.offset, part.offset + part.numel) for part in bucket.parts if part.round == 0]
    rounds = ((part, scheme.rounds(part.numel)[part.round]) for part in bucket.parts)
    kept_there = [part for part, round_ in rounds if round_.pair.pull.feedback and round_.numel == part.numel]
    places = [place for part in parts for place in part.places]
    goes_back = any(part.goes_back for part in parts)
    if layout.kind == "weights":  # servers keep no residual of these, but may keep a momentum
        kept_there = list(bucket.parts) if bucket.dtype == "float32" and UpdateRule.parse(layout.rule).keeps_momentum else []
    there = kept_there if layout.kind != "broadcast" else []
    kept = Kept(layout, bucket, places, True, there, f"worker {bucket.index}", goes_back)
    name = layout.tensors[bucket.tensors[0]].name if layout.kind == "plan" else ""
    return BucketWork(parts, [[(lo, hi - lo)] for lo, hi in slices], kept, OverServers(scheme, slices, name))


def over_groups(
    layout: Layout, bucket: Bucket, ranks: Ranks, rank: int, servers: Servers | None = None, collectives: str = "host"
) -> BucketWork:
    """A bucket whose option runs over groups. collectives: PSGC_COLLECTIVES, whether groups exchange floats from GPU to GPU. Raises UsageError where its codec
    cannot run so."""
    ranks = members_of(bucket, ranks, layout.tensors[bucket.tensors[0]].name)
    parts = _group_parts(layout, bucket, ranks, rank, servers)
    places = [place for part in parts for place in part.places]
    # A key, since each has or has no result by itself, or else a part.
    slices = [[(k.offset, k.numel) for k in keys_of(bucket, part)] or [(part.offset, part.numel)] for part in bucket.parts]
    there = list(bucket.keys) if any(part.servers_keep for part in parts) else []
    kind = zlib.crc32(f"{bucket.option} {ranks.text}".encode())  # another option, or nodes of other sizes, keep it elsewhere
    kept = Kept(layout, bucket, places, False, there, f"group {bucket.index} {kind:08x}", any(part.goes_back for part in parts))
    by_gpus = ranks.size > 1 and layout.kind == "plan"
    name = layout.tensors[bucket.tensors[0]].name
    return BucketWork(parts, slices, kept, OverGroups(bucket, layout.scheme(bucket), collectives if by_gpus else "host", name))


def _group_parts(layout: Layout, bucket: Bucket, ranks: Ranks, rank: int, servers: Servers | None) -> list[GroupPart]:
    """Compile the bucket's option for each part. ranks: those whose bucket it is."""
    members = bucket.members or ranks.everybody
    scheme, option = layout.scheme(bucket), " ".join(bucket.option)
    if type(scheme) is not PairScheme:
        raise UsageError(f"codec {scheme.canonical} runs over servers alone, not by {option}; choose another codec or option")
    pair, divisor = scheme.pair, ranks.size if layout.mean and not bucket.keys else 1  # servers divide
    stream = Stream(layout.seed, 0, rank, bucket.index, 0, layout.number)
    parts: list[GroupPart] = []
    for number, part in enumerate(bucket.parts):
        programs = compile_option(
            bucket.option, part.numel, ranks, members.index(layout.root) if layout.kind == "broadcast" else bucket.index + number
        )
        program, again = renumbered(programs[members.index(rank)], members), same_pieces(programs)
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
