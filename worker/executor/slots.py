"""The slots of a part: of each place of its program that encodes, the codec, the random numbers, and the residuals of the pieces that this rank encodes.

An option may encode up to four times: a gradient, or a sum of some ranks'. Residuals are in units of the sum: what a rank adds to a later step counts once in
its sum, whichever slot has kept it. So all slots of all ranks together are what has not been applied yet. Of a step that the trainer does not apply, slot 0,
through which all that goes into the sum passes, gets its own payload back, and later slots their old residual.

Invariant: what is kept changes only between steps and where a step's result is there (``commit``); encoding writes beside it (``Feedback.spare``).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray

from psgc.codecs.codec import Codec, CodecPair, Encoded, Stream
from psgc.codecs.scheme import slices
from psgc.program.ranks import Range
from psgc.program.steps import Encode, Program
from psgc.worker.device import DeviceBucket, bytes_of
from psgc.worker.executor.numbers import Bytes, Payload
from psgc.worker.residuals.feedback import Feedback
from psgc.worker.residuals.residual import Residual


class Slots:
    """stream: of the part, for this rank; each slot and piece has one of its own. again: of ``same_pieces``."""

    def __init__(self, program: Program, pair: CodecPair, stream: Stream, again: Mapping[int, bool]) -> None:
        self.pair, self._stream, self._again = pair, stream, again
        self._step = 0  # of the layout
        # Servers that keep a residual get back what the trainer did not apply; else this rank's slot 0 gets its own payload back.
        self.servers_add_back = pair.pull.feedback and program.has_servers
        self._feedback: dict[tuple[int, Range], Feedback] = {}
        self._leads: set[tuple[int, Range]] = set()  # those for whose residual this rank answers
        self._own: dict[Range, Payload] = {}  # what slot 0 has written, until the next step is encoded
        encodes = [step for step in program.steps if isinstance(step, Encode)]
        self._on_gpu = {step.slot for step in encodes if step.device == "gpu"}
        for step in (step for step in encodes if self.codec(step.slot).feedback):
            self._feedback |= {(step.slot, piece): self._new(step.slot, piece) for piece in step.pieces}
            self._leads |= {(step.slot, p) for p, leader in zip(step.pieces, step.leaders, strict=True) if leader == stream.rank}

    def _new(self, slot: int, piece: Range) -> Feedback:
        own = partial(self._add_own, piece) if slot == 0 and not self.servers_add_back else None
        return Feedback(piece[1] - piece[0], "float32", own, spare=True, takes_back=slot > 0)

    def codec(self, slot: int) -> Codec:
        """The codec of a slot's payloads, also of those that servers answer."""
        return self.pair.push if self.encoder(slot) == 0 else self.pair.pull

    def encoder(self, slot: int) -> int:
        """0 for the push codec, else the slot. A pull codec that takes only sums of payloads is, for other pieces, the push codec."""
        return slot if not self.pair.pull.of_sums or self._again.get(slot, False) else 0

    # a step of the layout

    def begin(self, step: int, dropped: bool, rescale: float, device: DeviceBucket | None) -> None:
        """A step of the layout starts. dropped: the last one counts as not applied. device: that its elements lie on; None: the host."""
        self._step = step
        for (slot, _), feedback in self._feedback.items():
            feedback.begin(dropped, rescale)
            feedback.move(device if slot in self._on_gpu else None)

    def _add_own(self, piece: Range, residual: Residual, device: DeviceBucket | None) -> None:
        """Add the elements of this rank's own payload."""
        payload, numel = self._own[piece], piece[1] - piece[0]
        if device is not None:
            device.add_payload(0, payload, residual, numel)
            return
        codec, values, held = self.codec(0), residual.load(), bytes_of(payload)
        for lo, hi in slices(codec, numel):
            codec.fold([held], numel, lo, hi, values[lo:hi], False)
        residual.keep(values)

    def inputs(self, step: Encode, piece: Range, leader: int) -> tuple[Any, Any, float, Stream]:
        """The residual that a piece is encoded with, the place of the new one (arrays on the host, a ``Residual`` each on a device), the residual's factor, and
        the random stream, which is the leader's."""
        stream = self._drawn(4 * leader + step.slot, piece)
        feedback = self._feedback.get((step.slot, piece))
        if feedback is None or feedback.value is None or feedback.spare is None:
            return None, None, 1.0, stream
        if feedback.device is not None:
            return feedback.value, feedback.spare, feedback.rescale, stream
        return feedback.value.load(), feedback.spare.load(), feedback.rescale, stream

    def _drawn(self, rank: int, piece: Range) -> Stream:
        """The random numbers that a piece is encoded with in this step."""
        return self._stream.at(self._step, rank, self._stream.first + piece[0])

    def wrote(self, slot: int, piece: Range, payload: Payload) -> None:
        """This payload was encoded."""
        if slot == 0:
            self._own[piece] = payload

    def push(self, floats: NDArray[Any], piece: Range, out: Bytes) -> Encoded:
        """Encode floats that servers get as they are, which is no slot."""
        return self.pair.push.encode(floats, None, 1.0, self._drawn(self._stream.rank, piece), out)

    def commit(self, slot: int, piece: Range) -> None:
        """A piece's payload is part of a result."""
        feedback = self._feedback.get((slot, piece))
        if feedback is not None:
            feedback.commit()

    def commit_all(self, but: Container[Range]) -> None:
        """As ``commit``, of all payloads except those of slot 0 of some pieces."""
        for (slot, piece), feedback in self._feedback.items():
            if slot or piece not in but:
                feedback.commit()

    @property
    def feedbacks(self) -> Iterator[tuple[Range, Feedback, bool]]:
        """Of each slot and piece, the piece, the feedback, and whether this rank answers for it: of what several ranks keep alike, the first one does."""
        return ((place[1], feedback, place in self._leads) for place, feedback in self._feedback.items())
