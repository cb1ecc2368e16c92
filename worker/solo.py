"""The session of a process that is alone: rank 0 of 1. The mean, or sum, of one gradient is that gradient.

Nothing travels and no codec runs: the aggregate is the unchanged gradient, whichever codec was named (its name is still checked).
Makes the same checks as a real job's session, so that a script that works alone also works in a job.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psgc.config import Config
from psgc.errors import JobFailed, NonFiniteError, UsageError
from psgc.layout import Declaration, Layout, build_layout
from psgc.program.ranks import Ranks
from psgc.worker.nonfinite import nonfinite_tensor
from psgc.worker.outcome import SessionWithOutcome
from psgc.worker.published import check_value
from psgc.worker.residuals.inherited import Inherited
from psgc.worker.residuals.residual import LayoutMemory, TensorMemory
from psgc.worker.session import BucketBuffer, Ticket


class DoneTicket:
    """A step that was over before its submission returned."""

    __slots__ = ()
    done = True


class SoloSession(SessionWithOutcome):
    """See Session. ``submit`` loads and stores at once, in the calling thread."""

    rank = 0
    ranks = Ranks((1,))

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._lock = threading.Lock()
        self._declared: dict[str, tuple[Declaration, Layout]] = {}
        self._published: dict[str, bytes] = {}
        self._taken: dict[tuple[str, int], int] = {}  # steps of each layout's buckets
        self._inherited: dict[tuple[str, int], Inherited] = {}  # residuals of a larger job, which go with the first gradient

    def declare(self, declaration: Declaration) -> Layout:
        self.check()
        with self._lock:
            known = self._declared.get(declaration.name)
            if known is None:
                used = frozenset(declaration.used) if declaration.kind == "plan" else None
                layout = build_layout(declaration, layout_id=len(self._declared), servers=1, workers=1, used_by_all=used)
                self._declared[declaration.name] = (declaration, layout)
                return layout
        declaration.check_same(known[0])
        return known[1]

    def submit(
        self, layout: Layout, bucket: int, buffer: BucketBuffer, *, skip: bool = False, previous_skipped: int = 0,
        rescale: float = 1.0,
    ) -> Ticket:  # fmt: skip
        self.check()
        array = buffer.load()
        if self.config.nonfinite == "raise" and not skip:
            self._refuse_nonfinite(layout, bucket, array)
        at = layout.name, bucket
        with self._lock:
            self._taken[at] = self._taken.get(at, 0) + 1
        inherited = self._inherited.get(at)
        if inherited is not None and not inherited.begin(previous_skipped, rescale):
            del self._inherited[at]
            inherited = None
        if inherited is not None and not skip:
            inherited.add_to(array, 0)
        buffer.store(skip)
        return DoneTicket()

    def submit_named(self, declaration: Declaration, buffer: BucketBuffer, *, skip: bool = False, priority: int | None = None) -> Ticket:
        return self.submit(self.declare(declaration), 0, buffer, skip=skip)

    def barrier(self) -> None:
        self.check()

    def publish(self, name: str, value: bytes) -> None:
        self.check()
        check_value(name, value)
        if self._published.setdefault(name, bytes(value)) != value:
            raise UsageError(f"two different values were published under the name {name!r}; a name has one value in a job")

    def lookup(self, name: str) -> bytes:
        self.check()
        check_value(name)
        if name not in self._published:
            raise UsageError(f"{name!r} is looked up, but this process is alone and has not published it: nobody else can")
        return self._published[name]

    def fail(self, text: str) -> None:
        self.outcome.fail(JobFailed(text), tells=False)

    def residuals(self) -> dict[str, NDArray[Any]]:
        return {}

    def remembered(self, layout: Layout, dropped: bool) -> LayoutMemory:
        memory = LayoutMemory(steps=layout.past_steps)
        for bucket in layout.buckets:
            memory.steps = layout.past_steps + self._taken.get((layout.name, bucket.index), 0)
            inherited = self._inherited.get((layout.name, bucket.index))
            if inherited is not None:
                left = inherited.left(dropped)
                memory.tensors |= {name: TensorMemory(left[place].copy()) for name, place in layout.places(bucket)}
        return memory

    def remember(self, layout: Layout, memory: LayoutMemory, alone: bool = False) -> None:
        """This session encodes nothing, so it keeps no residual: a larger job's residuals are added to the first step's gradients."""
        for bucket in layout.buckets:
            values = np.zeros(bucket.numel, np.float32)
            for name, place in layout.places(bucket):
                own = memory.tensors.get(name, TensorMemory()).residual
                for more in (own, memory.servers.get(name)):
                    if more is not None:
                        values[place] += more
            if values.any():
                self._inherited[layout.name, bucket.index] = Inherited(values)

    def statistics(self) -> dict[str, int]:
        return {
            "wire_bytes": 0, "resent": 0, "gradient_bytes": 0, "uncompressed_bytes": 0, "slowest_rank": -1,
            "least_waited_ms": 0, "most_waited_ms": 0,
        }  # fmt: skip

    def close(self) -> None:
        self.outcome.run_calls()
        self.outcome.closed = True

    def _refuse_nonfinite(self, layout: Layout, bucket: int, array: NDArray[Any]) -> None:
        tensor = nonfinite_tensor(layout, layout.buckets[bucket], array)
        if tensor is not None:
            raise NonFiniteError(f"tensor {tensor!r} on rank 0 holds NaN or infinity (PSGC_NONFINITE=raise)")
