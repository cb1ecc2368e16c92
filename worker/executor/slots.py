"""The slots of a part: of each place of its program that encodes, the codec, the random numbers, and the residuals of the pieces that this rank encodes.

Invariant: what is kept changes only between steps and where a step's result is there (``commit``); encoding writes beside it (``feedback.py``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.codec import Codec, CodecPair, Encoded, Stream
from psgc.codecs.scheme import slices
from psgc.program.ranks import Range
from psgc.program.steps import Encode, Program
from psgc.worker.device import DeviceBucket, bytes_of
from psgc.worker.executor.feedback import F32, Feedback
from psgc.worker.executor.numbers import Bytes, Payload


class Slots:
    """stream: of the part, for this rank; each slot and piece has one of its own. again: of ``same_pieces``."""

    def __init__(self, program: Program, pair: CodecPair, stream: Stream, again: Mapping[int, bool]) -> None:
        self.pair, self._stream, self._again = pair, stream, again
        # Servers that keep a residual get back what the trainer did not apply; else this rank's slot 0 gets its own payload back.
        self.servers_add_back = pair.pull.feedback and program.has_servers
        self._numel = program.numel
        self._feedback: dict[tuple[int, Range], Feedback] = {}
        self._leads: set[tuple[int, Range]] = set()  # those for whose residual this rank answers
        self._own: dict[Range, Payload] = {}  # what slot 0 has written, until the next step is encoded
        encodes = [step for step in program.steps if isinstance(step, Encode)]
        self._on_gpu = {step.slot for step in encodes if step.device == "gpu"}
        for step in (step for step in encodes if self.codec(step.slot).feedback):
            self._feedback |= {(step.slot, piece): Feedback(piece[1] - piece[0]) for piece in step.pieces}
            self._leads |= {(step.slot, p) for p, leader in zip(step.pieces, step.leaders, strict=True) if leader == stream.rank}

    def codec(self, slot: int) -> Codec:
        """The codec of a slot's payloads, also of those that servers answer."""
        return self.pair.push if self.encoder(slot) == 0 else self.pair.pull

    def encoder(self, slot: int) -> int:
        """0 for the push codec, else the slot. A pull codec that takes only sums of payloads is, for other pieces, the push codec."""
        return slot if not self.pair.pull.of_sums or self._again.get(slot, False) else 0

    # a step of the layout

    def begin(self, step: int, dropped: int, rescale: float) -> None:
        """A step of the layout starts. dropped: the last one counts as not applied."""
        self._stream = replace(self._stream, step=step)
        for (slot, piece), feedback in self._feedback.items():
            if dropped and slot:
                feedback.take_back()
            elif dropped and feedback.committed and not self.servers_add_back:
                self._add_back(piece, feedback)
            feedback.begin(rescale)

    def _add_back(self, piece: Range, feedback: Feedback) -> None:
        if feedback.on is not None:
            feedback.on.add_payload(0, self._own[piece], feedback.value, feedback.numel)
        else:
            self._add_own(piece, feedback.value)
        feedback.encoded()

    def _add_own(self, piece: Range, values: F32) -> None:
        """Add the elements of this rank's own payload."""
        codec, payload = self.codec(0), bytes_of(self._own[piece])
        for lo, hi in slices(codec, values.size):
            codec.fold([payload], values.size, lo, hi, values[lo:hi], False)

    def move(self, device: DeviceBucket) -> None:
        """Keep the residuals of what is encoded on a device there."""
        for (slot, _), feedback in self._feedback.items():
            feedback.move(device if slot in self._on_gpu else None)

    def inputs(self, step: Encode, piece: Range, leader: int) -> tuple[Any, Any, float, Stream]:
        """The residual that a piece is encoded with, the place of the new one, the residual's factor, and the random stream, which is the leader's."""
        stream = replace(self._stream, rank=4 * leader + step.slot, first=self._stream.first + piece[0])
        feedback = self._feedback.get((step.slot, piece))
        if feedback is None:
            return None, None, 1.0, stream
        feedback.encoded()
        return feedback.value, feedback.new, feedback.rescale, stream

    def wrote(self, slot: int, piece: Range, payload: Payload) -> None:
        """This payload was encoded."""
        if slot == 0:
            self._own[piece] = payload

    def push(self, floats: NDArray[Any], piece: Range, out: Bytes) -> Encoded:
        """Encode floats that servers get as they are, which is no slot."""
        return self.pair.push.encode(floats, None, 1.0, replace(self._stream, first=self._stream.first + piece[0]), out)

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

    # between steps

    def _kept(self, slot: int, piece: Range, dropped: bool) -> tuple[F32, float]:
        """A copy of what is kept of a piece, and the factor by which it must still be multiplied. dropped: the trainer did not apply the last step."""
        feedback = self._feedback[slot, piece]
        if not dropped or not feedback.committed or (slot == 0 and self.servers_add_back):
            return feedback.copy(), feedback.rescale
        if slot:
            return feedback.before_last
        values = feedback.copy()
        self._add_own(piece, values)
        return values, feedback.rescale

    def remembered(self, dropped: bool) -> F32:
        """What this rank's slots hold together, by element, in the next step's units; of what several ranks keep alike, the first one's."""
        total = np.zeros(self._numel, np.float32)
        for slot, piece in (place for place in self._feedback if place in self._leads):
            values, rescale = self._kept(slot, piece, dropped)
            total[piece[0] : piece[1]] += values * np.float32(rescale)
        return total

    def exact(self, dropped: bool) -> list[tuple[F32, float]]:
        """What each slot of this rank keeps of each piece, and the factor by which it must still be multiplied."""
        return [self._kept(slot, piece, dropped) for slot, piece in self._feedback]

    @property
    def feedbacks(self) -> list[Feedback]:
        """In the order of ``exact``."""
        return list(self._feedback.values())
