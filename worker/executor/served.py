"""A slice of a bucket that every rank pushes to servers, as a program: every round is encoded, then served.

Invariant: a slice's rounds follow one another, and each has a contribution, with or without a payload; payloads stay in the keys' slots until the next step
is encoded, so that a step that the trainer does not apply can be added back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import BucketContext, Encoded, Scheme, SchemeState, Stream, parse_scheme
from psgc.codecs.none import NoneCodec
from psgc.errors import CodecError, DeviceError, LocalProtocolError, PsgcError
from psgc.layout import Bucket, Layout, Part
from psgc.layout.building import UNCOMPRESSED
from psgc.observe.lanes import DECODE, ENCODE
from psgc.program.groups import Groups
from psgc.program.ranks import Range
from psgc.program.steps import Decode, Encode, Program, Serve, Step, Transfer
from psgc.transport.link import IN_PLACE_BYTES
from psgc.wire.frames import Flag
from psgc.worker.contributions import Contribution, Servers, Slot, pushes_elements
from psgc.worker.device import DeviceBucket
from psgc.worker.executor.control import Agreement, Control
from psgc.worker.executor.location import Location
from psgc.worker.executor.work import Span
from psgc.worker.residuals.feedback import Feedback, PlacedState
from psgc.worker.residuals.kept import EncodingPlace
from psgc.worker.residuals.residual import Residual
from psgc.worker.submission import Submission

Bytes = NDArray[np.uint8]
NOTHING: Final = Encoded(0, False)  # what a rank that skips contributes


class RoundSlots:
    """The slots of a slice's keys, by round, and the lengths of the payloads in them. in_place: a slice on the host is its own payload, and its result is
    received there, so that slots are not used."""

    def __init__(self, slots: Sequence[Slot], in_place: bool) -> None:
        self._slots, self._lengths, self._fresh = slots, [0] * len(slots), set(range(len(slots)))
        self._in_place = in_place

    def own(self, array: NDArray[Any]) -> Bytes | None:
        """The slice as its own payload, where it is that. array: the slice; empty if it lies on a device."""
        return array.view(np.uint8) if self._in_place and array.size else None

    def out(self, index: int, array: NDArray[Any]) -> Bytes:
        """Where the round's payload is encoded. array: as of ``own``."""
        own = self.own(array)
        if own is not None:
            return own
        if index in self._fresh:
            self._fresh.discard(index)
            self._slots[index].populate()
        return self._slots[index].bytes

    def wrote(self, index: int, payload_bytes: int) -> None:
        self._lengths[index] = payload_bytes

    @property
    def sent(self) -> list[Bytes]:
        """The payloads of the last step."""
        return [slot.bytes[:length] for slot, length in zip(self._slots, self._lengths, strict=True)]


@dataclass(slots=True)
class _UnderWay:
    """A slice's step. array: the slice, where it lies on the host; stream: the slice's; encoded: what the round under way contributes."""

    submission: Submission
    stream: Stream
    array: NDArray[Any]
    encoded: Encoded = NOTHING


class ServedPart:
    """A PartWork. rounds: the slice's keys, one a round; state: the scheme's of this slice; initial: what the first step is encoded with, if that is another.
    stream: of the slice, but for the step's number; keeps: whether what encoding leaves out is kept."""

    def __init__(
        self, rounds: Sequence[Part], scheme: Scheme, state: SchemeState, initial: SchemeState | None, slots: RoundSlots, stream: Stream,
        keeps: bool,
    ) -> None:  # fmt: skip
        self._rounds, self._initial, self._slots, self._stream = rounds, initial, slots, stream
        self._slice = (rounds[0].offset, rounds[0].offset + rounds[0].numel)
        whole = (0, rounds[0].numel)
        steps = ((Encode(2 * n, n, "cpu", (stream.rank,), (whole,)), Serve(2 * n + 1, n, (whole,))) for n in range(len(rounds)))
        self.program = Program(rounds[0].numel, tuple(step for pair in steps for step in pair), len(rounds), has_servers=True)
        self.agreement = Agreement(
            stream.rank, has_servers=False
        )  # of what servers tell: a step that all ranks skip has no result to take back
        servers_add_back = any(round_.pair.pull.feedback for round_ in state.rounds)
        self._feedback = Feedback(rounds[0].numel, scheme.residual_dtype if keeps else None, None if servers_add_back else self._add_own)
        self._placed = PlacedState(state, *self._slice)
        self._step: _UnderWay  # the last one, once there is one

    moved_bytes = 0  # the network thread counts what servers get

    @property
    def goes_back(self) -> bool:
        return self._feedback.by_servers

    @property
    def places(self) -> Iterator[EncodingPlace]:
        yield EncodingPlace(slice(*self._slice), self._feedback, self.agreement, True, self._placed)

    def begin(self, step: int, submission: Submission, location: Location, array: NDArray[Any]) -> None:
        dropped = self.agreement.begin(submission.skip, submission.previous_skipped, on_host=True)
        self._feedback.begin(bool(dropped), submission.rescale)
        self._feedback.move(location.device)
        self._placed.begin(location.device)
        self._step = _UnderWay(submission, self._stream.at(step), array[slice(*self._slice)])

    @property
    def _device(self) -> DeviceBucket | None:
        return self._placed.device

    @property
    def on_device(self) -> bool:
        return self._placed.device is not None

    def _add_own(self, residual: Residual, device: DeviceBucket | None) -> None:
        if device is not None:
            device.add_back(*self._slice, residual)
            return
        values = residual.load()
        self._placed.state.add_back(self._slots.sent, values)
        residual.keep(values)

    # steps of the program

    def compute(self, step: Encode | Decode, then: Callable[[PsgcError | None], None]) -> None:
        index, now = step.slot, self._step
        now.encoded = NOTHING
        if now.submission.skip:
            then(None)
            return
        if self.agreement.control.nonfinite:  # every rank knows this of an earlier round, so none sends a payload in the remaining ones
            now.encoded = Encoded(0, True)
            then(None)
            return

        def encoded(found: Encoded | DeviceError) -> None:
            if isinstance(found, DeviceError):
                then(found)
                return
            now.encoded = found
            self._slots.wrote(index, found.payload_bytes)
            then(None)

        out, value, rescale = self._slots.out(index, now.array), self._feedback.value, self._feedback.rescale
        if self._device is not None:
            self._device.encode(index, *self._slice, value, rescale, now.stream, out, encoded)
        elif self._initial is not None:
            encoded(self._initial.encode(0, now.array, None, 1.0, now.stream, out))
        else:
            residual = None if value is None else value.load()
            encoded(self._placed.state.encode(index, now.array, residual, rescale, now.stream, out))

    def transfer(self, step: Transfer, groups: Groups) -> int:
        raise LocalProtocolError("a slice that all ranks push to servers has no transfers")

    def contribution(self, step: Serve, piece: Range, then: Callable[[int, Any], None]) -> Contribution:
        said, encoded = self._step.submission, self._step.encoded
        own = self._slots.own(self._step.array)
        return Contribution(
            self._key(step), encoded.payload_bytes, encoded.nonfinite, said.previous_skipped, said.rescale, then, said.skip, said.priority, own, own
        )  # fmt: skip

    def take(self, step: Serve, piece: Range, flags: int, payload: Bytes | None) -> int:
        key, index = self._key(step), step.slot or 0
        skipped, nonfinite = bool(flags & Flag.SKIPPED), bool(flags & Flag.NONFINITE)
        payload = np.empty(0, np.uint8) if payload is None else payload
        if index < len(self._rounds) - 1:
            self.agreement.control.nonfinite = nonfinite
            if not skipped and not nonfinite:
                self._take(index, payload)
            return key
        self.agreement.agreed(Control(not skipped, nonfinite, False))
        initial, self._initial = self._initial is not None, None
        if not skipped and nonfinite:
            self._fill(np.nan)
        elif not skipped:
            self._apply(payload, own=not self._step.submission.skip and not self._step.encoded.nonfinite and not initial)
        return key

    def _take(self, index: int, payload: Bytes) -> None:
        """Go on from the result of a round that is not the last."""
        if self._device is not None:
            self._device.take(index, *self._slice, payload)
        else:
            self._placed.state.take(index, payload)

    def _fill(self, value: float) -> None:
        if self._device is not None:
            self._device.fill(*self._slice, value)
        else:
            self._step.array.fill(value)

    def _apply(self, payload: Bytes, own: bool) -> None:
        """Make the slice the aggregate. own: this rank's payload is part of it; commit what that has left out."""
        feedback, value = self._feedback, self._feedback.value if own else None
        if self._device is not None:
            self._device.apply(*self._slice, payload, value, feedback.rescale)
        else:
            residual = None if value is None else value.load()
            self._placed.state.apply(payload, self._slots.sent, self._step.array, residual, feedback.rescale)
            if value is not None and residual is not None:
                value.keep(residual)
        if own:
            feedback.commit()

    def end(self) -> None:
        """Nothing is left to do."""

    def clear(self) -> None:
        self._fill(0.0)

    def has_result(self, first: int) -> bool:
        return self.agreement.control.contributed and not self.agreement.control.nonfinite

    def span(self, step: Step) -> Span | None:
        if isinstance(step, Serve):
            return Span(DECODE, self._key(step))
        if isinstance(step, Encode) and not self._step.submission.skip:
            return Span(ENCODE, self._key(step), self._step.encoded.payload_bytes)
        return None

    def _key(self, step: Serve | Encode) -> int:
        return self._rounds[step.slot or 0].key


def _is_its_payload(scheme: Scheme, part: Part) -> bool:
    """Whether the elements of a slice are what is pushed and what comes back, and enough of them."""
    plain = pushes_elements(scheme) and isinstance(scheme.rounds(part.numel)[0].pair.pull, NoneCodec)
    return plain and scheme.push_bound(part.numel) >= IN_PLACE_BYTES


def served_parts(layout: Layout, bucket: Bucket, servers: Servers, rank: int) -> list[ServedPart]:
    """A part for each slice of the bucket. Raises CodecError, with the tensor, for a slice that the codec does not take."""
    scheme = layout.scheme(bucket)
    keeps = scheme.feedback and layout.kind != "broadcast"
    # The first step's elements are the weights' initial values, which travel as they come back: uncompressed.
    initial = parse_scheme(UNCOMPRESSED, BucketContext(bucket.dtype)) if layout.kind == "weights" else None
    slices: list[list[Part]] = []
    for part in bucket.parts:
        if part.round == 0:
            slices.append([])
        slices[-1].append(part)
    parts = []
    for rounds in slices:
        lo, numel = rounds[0].offset, rounds[0].numel
        try:
            state = scheme.new_state(numel)
        except CodecError as error:
            raise CodecError(f"tensor {layout.tensor_at(bucket, lo)!r}: {error}") from None
        in_place = _is_its_payload(scheme, rounds[0]) and servers.in_place(rounds[0].key)
        slots = RoundSlots([servers.slot(part.key) for part in rounds], in_place)
        stream = Stream(layout.seed, 0, rank, bucket.index, lo, layout.number)
        first = None if initial is None else initial.new_state(numel)
        parts.append(ServedPart(rounds, scheme, state, first, slots, stream, keeps))
    return parts
