"""A part of a tensor on BytePS's wire, as a program: encode, push and pull, decode. Numbers only, in BytePS's compressors and element types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.common.floats import reference_narrow_bf16, reference_widen_bf16
from psgc.errors import LocalProtocolError, PsgcError, RemoteProtocolError
from psgc.layout import Bucket, Layout, Part
from psgc.program.groups import Groups
from psgc.program.ranks import Range
from psgc.program.steps import Decode, Encode, Program, Serve, Step, Transfer
from psgc.pslite.byteps.compressor import Compressor
from psgc.worker.contributions import Contribution
from psgc.worker.executor.control import Agreement, Control
from psgc.worker.executor.location import Location
from psgc.worker.executor.work import Span
from psgc.worker.pslite.numbering import CARRIED_AS
from psgc.worker.residuals.kept import EncodingPlace
from psgc.worker.submission import Submission

Array = NDArray[Any]


class PsLitePart:
    """A PartWork. compressor: the part's; None: it travels as it is. BytePS's compressors keep their residuals themselves."""

    goes_back = on_device = False
    moved_bytes = 0  # which ``PsLiteServers`` counts

    def __init__(self, layout: Layout, bucket: Bucket, part: Part, rank: int, compressor: Compressor | None) -> None:
        self._layout, self._bucket, self._part, self._compressor = layout, bucket, part, compressor
        whole = (0, part.numel)
        self.program = Program(part.numel, (Encode(0, 0, "cpu", (rank,), (whole,)), Serve(1, 0, (whole,))), 1, has_servers=True)
        self.agreement = Agreement(rank, has_servers=False)
        self._wire = np.dtype(CARRIED_AS[bucket.dtype])
        self._array: Array = np.empty(0)
        self._skip = False
        self._payload: Any = b""

    @property
    def places(self) -> Iterator[EncodingPlace]:
        return iter(())

    def begin(self, step: int, submission: Submission, location: Location, array: Array) -> None:
        self._skip = submission.skip
        self.agreement.begin(submission.skip, submission.previous_skipped, on_host=True)
        self._array = array[self._part.offset : self._part.offset + self._part.numel]

    def compute(self, step: Encode | Decode, then: Callable[[PsgcError | None], None]) -> None:
        if self._skip:
            own = np.zeros(self._part.numel, self._wire)
        elif self._bucket.dtype == "bfloat16":
            own = reference_widen_bf16(self._array)
        else:
            own = np.ascontiguousarray(self._array, self._wire)
        self._payload = own.view(np.uint8) if self._compressor is None else self._compressor.encode(own)
        then(None)

    def transfer(self, step: Transfer, groups: Groups) -> int:
        raise LocalProtocolError("a tensor on BytePS's wire has no transfers")

    def contribution(self, step: Serve, piece: Range, then: Callable[[int, Any], None]) -> Contribution:
        return Contribution(self._part.key, len(self._payload), False, 0, 1.0, then, self._skip, payload=self._payload)

    def take(self, step: Serve, piece: Range, flags: int, payload: Any) -> int:
        """Raises RemoteProtocolError, too, for a sum of another length."""
        wanted = self._part.numel * self._wire.itemsize
        if self._compressor is None and len(payload) != wanted:
            name, number = self._layout.tensor_at(self._bucket, 0), self._bucket.parts.index(self._part)
            raise RemoteProtocolError(
                f"the sum of tensor {name!r}, part {number}, is {len(payload)} bytes; expected {wanted} of {self._wire}"
            )
        total = np.frombuffer(payload, self._wire) if self._compressor is None else self._compressor.decode(payload)
        self._array[:] = self._result(total)
        self.agreement.agreed(Control(True, False, False))
        return self._part.key

    def end(self) -> None:
        """Nothing is left to do."""

    def clear(self) -> None:
        self._array.fill(0)

    def has_result(self, first: int) -> bool:
        return True

    def span(self, step: Step) -> Span | None:
        return None

    def _result(self, total: Array) -> Array:
        if self._layout.mean and total.dtype.kind in "iu":
            total = total // self._layout.workers
        elif self._layout.mean:
            wide: Array = total.astype(np.float64 if total.dtype.itemsize == 8 else np.float32)
            total = (wide / wide.dtype.type(self._layout.workers)).astype(total.dtype)
        if self._bucket.dtype == "bfloat16":
            return reference_narrow_bf16(np.asarray(total, np.float32))
        return total != 0 if self._bucket.dtype == "bool" else total.astype(self._array.dtype)
