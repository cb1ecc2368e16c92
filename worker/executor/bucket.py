"""A bucket whose option runs over groups: its parts at work, its gradient's memory, and what it keeps between steps.

It offers what ``worker/bucket.py`` offers of buckets over servers: what is remembered by tensor, so that a state can be saved and loaded in a
job with other options. Numbers only.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from psgc.codecs import Stream
from psgc.codecs.none import NoneCodec
from psgc.codecs.scheme import PairScheme
from psgc.errors import ConfigError, UsageError
from psgc.layout import Bucket, Layout, Part
from psgc.layout.contributions import keys_of
from psgc.program.compile import compile_option
from psgc.program.ranks import Range, Ranks
from psgc.program.steps import same_pieces
from psgc.worker.contributions import Servers
from psgc.worker.device import DeviceBucket
from psgc.worker.executor.part import PartWork
from psgc.worker.nonfinite import first_nonfinite
from psgc.worker.residuals.owed import Owed
from psgc.worker.residuals.residual import ExactResidual, TensorMemory
from psgc.worker.session import BucketBuffer, DeviceBuffer


class GroupBucket:
    """See the module's text."""

    def __init__(
        self, layout: Layout, bucket: Bucket, ranks: Ranks, rank: int, servers: Servers | None = None, collectives: str = "host"
    ) -> None:
        """collectives: PSGC_COLLECTIVES, whether groups exchange floats from GPU to GPU."""
        self.layout, self.bucket = layout, bucket
        scheme = layout.scheme(bucket)
        if type(scheme) is not PairScheme:
            raise UsageError(
                f"codec {scheme.canonical} runs over servers alone, not by {' '.join(bucket.option)}; choose another codec or option"
            )
        self.scheme = scheme
        divisor = ranks.size if layout.mean and not bucket.keys else 1  # servers divide
        self.step = 0
        is_broadcast = layout.kind == "broadcast"
        stream = Stream(layout.seed, 0, rank, bucket.index, 0, layout.number)
        self.parts: list[PartWork] = []
        self.keys: list[dict[Range, int]] = []  # of each part, the keys that this rank pushes
        for number, part in enumerate(bucket.parts):
            programs = compile_option(bucket.option, part.numel, ranks, layout.root if is_broadcast else bucket.index + number)
            program, again = programs[rank], same_pieces(programs)
            if scheme.pair.pull.of_sums and scheme.pair.push.unbiased and not all(again.values()):
                raise UsageError(
                    f"codec {scheme.canonical} of the bucket of {layout.tensors[bucket.tensors[0]].name!r} keeps no residual, and {' '.join(bucket.option)} "
                    f"encodes again in other pieces, which would make its mean wrong; choose ef=1, or another option"
                )
            keys = {(k.offset - part.offset, k.offset - part.offset + k.numel): k.key for k in keys_of(bucket, part)}
            self.keys.append({piece: keys[piece] for piece in program.served})
            places = {} if servers is None else {piece: servers.slot(key) for piece, key in self.keys[-1].items()}
            self.parts.append(PartWork(program, scheme.pair, bucket.dtype, part.offset, stream, divisor, places, again))
        self.on_gpu = any(action.endswith("@gpu") for action in bucket.option)
        self._collectives = collectives if ranks.size > 1 and layout.kind == "plan" else "host"
        # Without a codec the gradient can lie on a GPU all through the program, as it is.
        self._moves_floats = not any("@" in action for action in bucket.option) and bucket.dtype in ("float32", "bfloat16", "float16")
        self.keeps_residual = any(part.keeps_residual for part in self.parts)
        encodes = any(part.program.encodes for part in self.parts)
        # Whether a step that the trainer does not apply goes back into residuals, whose it was: what was owed is then in them.
        self._goes_back = (encodes and scheme.pair.push.feedback) or any(part.servers_add_back for part in self.parts)
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

    def begin(self, buffer: BucketBuffer, skip: bool, previous_skipped: int, rescale: float, check: bool = False) -> str | None:
        """A step starts; the last one has been stored. check: answer with the first tensor that holds a NaN or infinity."""
        self._buffer = buffer
        self.step += 1
        if self.on_gpu and isinstance(buffer, DeviceBuffer):  # others hold arrays, which lie on the host alone
            device = buffer.on_device(self.scheme, wanted=True)
            if device is None:
                raise UsageError(f"the plan has the bucket of {self.first_tensor!r} encoded on a GPU, but it lies on the CPU")
            return self._begin_there(device, skip, previous_skipped, rescale, check, self._collectives != "host", np.float32)
        lies = self._lies(buffer)
        if lies is not None and all(work.groups_on_gpus for work in self.parts):
            return self._begin_there(lies, skip, previous_skipped, rescale, check, True, NoneCodec(self.bucket.dtype).array_dtype)
        array = buffer.load()
        if check and not skip and (first := first_nonfinite(array, self.bucket.dtype)) is not None:
            return self.layout.tensor_at(self.bucket, first)
        if skip:
            array.fill(0)
        if self._owed is not None and not self._owed.begin(previous_skipped and not self._goes_back, rescale):
            self._owed = None
        for part, work, paid in zip(self.bucket.parts, self.parts, self._paid, strict=True):
            own = array[part.offset : part.offset + part.numel]
            if self._owed is not None and not skip:
                for lo, numel in paid:
                    self._owed.add_to(array[lo : lo + numel], lo)
            work.begin(own, self.layout.past_steps + self.step, skip, previous_skipped, rescale, lies)
        return None

    def _begin_there(
        self, device: DeviceBucket, skip: bool, previous_skipped: int, rescale: float, check: bool, groups: bool, dtype: Any
    ) -> str | None:
        """``begin`` where the program works on a GPU. groups: whether groups may exchange floats there; dtype: theirs on the host."""
        numel = self.bucket.numel
        if check and not skip and (first := device.nonfinite(0, numel)) is not None:
            return self.layout.tensor_at(self.bucket, first)
        if skip:
            device.fill(0, numel, 0.0)
        if self._owed is not None and not self._owed.begin(previous_skipped and not self._goes_back, rescale):
            self._owed = None
        for work, paid in zip(self.parts, self._paid, strict=True):
            if self._owed is not None and not skip:
                for lo, count in paid:
                    device.add(lo, self._owed.pay(lo, lo + count))
            work.begin_there(device, self.layout.past_steps + self.step, skip, previous_skipped, rescale, groups, dtype)
        return None

    def _lies(self, buffer: BucketBuffer) -> DeviceBucket | None:
        """The device that the gradient lies on, where groups may exchange it there. Raises ConfigError where they must, and it does not."""
        if self._collectives == "host" or not self._moves_floats:
            return None
        lies = buffer.lying() if isinstance(buffer, DeviceBuffer) else None
        if lies is None and self._collectives == "nccl":
            raise ConfigError(
                f"PSGC_COLLECTIVES=nccl, but the gradients in the bucket of {self.first_tensor!r} do not lie on one GPU; move them there, "
                "or set PSGC_COLLECTIVES=auto or host"
            )
        return lies

    def end(self, number: int) -> None:
        """A part's control word has been agreed on."""
        work, part = self.parts[number], self.bucket.parts[number]
        work.end()
        if self._owed is not None:
            for lo, _ in self._paid[number]:
                if not work.control.contributed or work.has_none(lo - part.offset):
                    self._owed.unpaid(lo)

    def store(self) -> None:
        """All parts are through: give the aggregate to its tensors."""
        assert self._buffer is not None
        self._buffer.store(not any(work.control.contributed for work in self.parts))
        self._buffer = None

    @property
    def unapplied(self) -> bool:
        """Whether servers are still to be told that the last result was not applied: all ranks had skipped."""
        return any(work.unapplied for work in self.parts)

    # between steps

    def remembered(self, dropped: bool = False) -> dict[str, TensorMemory]:
        """What is kept between steps, by tensor; none of its steps may be under way. dropped: the trainer did not apply the last result."""
        if not self.keeps_residual and self._owed is None:
            return {}
        values = np.zeros(self.bucket.numel, np.float32)
        for part, work in zip(self.bucket.parts, self.parts, strict=True):
            values[part.offset : part.offset + part.numel] = work.remembered(dropped)
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
        kept = [each for part in self.parts for each in part.exact(dropped)]
        return {number: ExactResidual(rescale, values.view(np.uint8)) for number, (values, rescale) in enumerate(kept)}

    def set_exact(self, residuals: Mapping[int, ExactResidual]) -> None:
        """Go on from the ``exact`` of a bucket with the same slots, in place of what is owed; called after ``remember``."""
        feedbacks = [feedback for part in self.parts for feedback in part.feedbacks]
        fit = residuals.keys() == set(range(len(feedbacks)))
        if not feedbacks or not fit or any(residuals[n].bytes.size != 4 * each.numel for n, each in enumerate(feedbacks)):
            return
        for number, feedback in enumerate(feedbacks):
            feedback.restore(residuals[number].bytes.view(np.float32), residuals[number].rescale)
        self._owed = None

    def server_parts(self) -> list[Part]:
        """The keys of which servers keep a residual; not of this rank's alone."""
        return list(self.bucket.keys) if self.scheme.pair.pull.feedback else []

    def tensor_places(self) -> Iterator[tuple[str, slice]]:
        """Where each tensor's elements lie in the bucket."""
        return self.layout.places(self.bucket)
