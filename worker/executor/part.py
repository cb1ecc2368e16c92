"""A part of a bucket whose option runs over groups: its program's steps on this rank's numbers.

It owns no state of its own: floats and payloads are ``numbers.py``'s, residuals ``slots.py``'s, the control word ``control.py``'s, what servers get
``pieces.py``'s. Which step runs when is ``psgc.program.run``'s, threads are ``executor``'s. Invariant: at most one step of a part runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.codec import CodecPair, Stream
from psgc.errors import PsgcError
from psgc.program.groups import Groups
from psgc.program.ranks import Range
from psgc.program.steps import Decode, Encode, Program, Serve, Step, Transfer
from psgc.transport.memory.segment import Place
from psgc.worker.contributions import Contribution
from psgc.worker.executor.coding import Coding
from psgc.worker.executor.control import Agreement
from psgc.worker.executor.location import Location
from psgc.worker.executor.numbers import Bytes, Numbers
from psgc.worker.executor.pieces import ServedPieces
from psgc.worker.executor.slots import Slots
from psgc.worker.executor.transfers import Transfers, divided_sum
from psgc.worker.executor.work import Span
from psgc.worker.residuals.kept import EncodingPlace
from psgc.worker.submission import Submission


class GroupPart:
    """A PartWork. key: the part's; stream: of the part, for this rank. divisor: what the sum is divided by. again: of ``same_pieces``. keys, places: as in
    ``ServedPieces``."""

    def __init__(
        self, program: Program, pair: CodecPair, dtype: str, key: int, stream: Stream, divisor: int, again: Mapping[int, bool],
        keys: Mapping[Range, int], places: Mapping[Range, Place],
    ) -> None:  # fmt: skip
        self.program, self.key, self.offset = program, key, stream.first
        self._divisor = divisor if divided_sum(program) is None else 1
        self._numbers = Numbers(stream.first, program.numel, dtype)
        self._slots = Slots(program, pair, stream, again)
        self.agreement = Agreement(stream.rank, program.has_servers)
        self._pieces = ServedPieces(program, self._numbers, self._slots, keys, places)
        self._transfers = Transfers(program, stream.rank, self._numbers, self._slots, self.agreement, divisor)
        self._coding = Coding(program, self._numbers, self._slots, self.agreement, self._transfers, self._pieces)

    def begin(self, step: int, submission: Submission, location: Location, array: NDArray[Any]) -> None:
        if location.device is None:  # of the push codec's ``array_dtype`` where the option encodes, else of the tensors' own dtype
            self._numbers.lie_on_host(array[self.offset : self.offset + self.program.numel])
        else:
            self._numbers.lie_on(location.device, location.dtype)
        self._transfers.device = location.exchanged or self._transfers.device
        dropped = self.agreement.begin(submission.skip, submission.previous_skipped, location.exchanged is None)
        self._pieces.begin(dropped, submission.rescale)
        self._slots.begin(step, bool(dropped), submission.rescale, location.device)
        if submission.skip:
            self._numbers.fill((0, self.program.numel), 0)

    # steps of the program

    def compute(self, step: Encode | Decode, then: Callable[[PsgcError | None], None]) -> None:
        self._coding.run(step, then)

    def transfer(self, step: Transfer, groups: Groups) -> int:
        before = self._transfers.moved_bytes
        self._transfers.run(step, groups)
        return self._transfers.moved_bytes - before

    def contribution(self, step: Serve, piece: Range, then: Callable[[int, Any], None]) -> Contribution:
        return self._pieces.contribution(step, piece, then)

    def take(self, step: Serve, piece: Range, flags: int, payload: Bytes | None) -> int:
        return self._pieces.take(step, piece, flags, payload)

    def span(self, step: Step) -> Span | None:
        return None if isinstance(step, Serve) else Span(step.action, self.key)

    def end(self) -> None:
        """After the ranks have agreed, on every rank alike: commit residuals, and turn the sum into the mean."""
        control = self.agreement.control
        if not control.contributed:
            return
        if control.nonfinite:
            self._numbers.fill((0, self.program.numel), np.nan)
            return
        self._slots.commit_all(but=self._pieces.encoded)
        if self._divisor != 1:
            self._numbers.divide(self._divisor)
        self._numbers.to_device()

    def clear(self) -> None:
        self._numbers.fill((0, self.program.numel), 0)

    def has_result(self, first: int) -> bool:
        # Where some rank met a NaN or infinity in what it encoded, the piece that begins there has no result.
        has_none = self.program.encodes > 0 and self._numbers.is_nan(first - self.offset)
        return self.agreement.control.contributed and not has_none

    @property
    def places(self) -> Iterator[EncodingPlace]:
        for (lo, hi), feedback, leads in self._slots.feedbacks:
            yield EncodingPlace(slice(self.offset + lo, self.offset + hi), feedback, self.agreement, leads)

    @property
    def goes_back(self) -> bool:
        return bool(self.program.encodes and self._slots.pair.push.feedback) or self._slots.servers_add_back

    @property
    def servers_keep(self) -> bool:
        """Whether servers keep a residual of what the part pushes to them."""
        return self._slots.pair.pull.feedback

    @property
    def moved_bytes(self) -> int:
        return self._transfers.moved_bytes

    @property
    def on_device(self) -> bool:
        return self._numbers.device is not None
