"""The state that one rank saves of a layout, and restores: its own residuals and its share of the servers'.

Owns the mapping between tensors, by which states are saved, and the parts that servers keep. Numbers only: the session carries the messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from psgc.errors import PsgcError, UsageError
from psgc.layout import Layout, Part, key_text
from psgc.wire.frames import Flag
from psgc.wire.messages import RESIDUAL_NUMEL
from psgc.worker.executor.bucket import BucketWork
from psgc.worker.residuals.residual import F32, ExactResidual, LayoutMemory, TensorMemory
from psgc.worker.residuals.transfers import Transfer


def own_memory(layout: Layout, works: Iterable[BucketWork], dropped: bool) -> LayoutMemory:
    """The state that this rank keeps itself. None of the layout's steps may be under way."""
    memory = LayoutMemory(steps=layout.past_steps)
    for work in works:
        memory.tensors |= work.kept.remembered(dropped)
        memory.exact |= {f"{work.kept.exact_place}.{number}": exact for number, exact in work.kept.exact(dropped).items()}
        memory.steps = layout.past_steps + work.step
    return memory


def questions(works: Sequence[BucketWork], dropped: bool) -> dict[int, list[Transfer]]:
    """The transfers that ask the servers for these buckets' residuals, by key."""
    flags = {work.kept.name: Flag.PREVIOUS_SKIPPED if dropped or work.unapplied else Flag.NONE for work in works}
    return {
        part.key: [Transfer(part.key, first, work.step, flags[work.kept.name]) for first in range(0, part.numel, RESIDUAL_NUMEL)]
        for work in works
        for part in work.kept.server_parts
    }


def take_answers(memory: LayoutMemory, works: Iterable[BucketWork], answers: dict[int, list[Transfer]]) -> None:
    """Add the servers' residuals of these buckets to the memory. Raises PsgcError for answers that are too short."""
    for work in works:
        parts = work.kept.server_parts
        if not parts:
            continue
        values = np.zeros(work.bucket.numel, np.float32)
        for part in parts:
            residual = np.concatenate(
                [np.frombuffer(b"" if answer.answer is None else answer.answer, np.float32) for answer in answers[part.key]]
            )
            if residual.size != part.numel:
                raise PsgcError(f"server {part.server}: residual of key {key_text(part.key)} of {residual.size} elements, not {part.numel}")
            rescale = answers[part.key][0].rescale
            if rescale != 1.0:
                memory.exact[_server_place(work, part)] = ExactResidual(rescale, residual.view(np.uint8))
            values[part.offset : part.offset + part.numel] = residual * np.float32(rescale)
        memory.servers |= {name: values[place].copy() for name, place in work.kept.tensor_places()}


def take_up(memory: LayoutMemory, layout: Layout, works: Sequence[BucketWork]) -> list[Transfer]:
    """Go on from ``memory``, before the layout's first step. Returns the transfers that set the servers' residuals.

    A server's saved residual of a tensor goes to the server's residual if this layout has one, else to this rank's own: multiplied by the number of ranks
    that are summed if the tensor's mean is taken, because there it counts so much less. Raises UsageError if the memory is of other parts.
    """
    restores: list[Transfer] = []
    for work in works:
        if work.step:
            raise UsageError(f"residuals of {layout.name!r} are taken up before its first step, not after step {work.step}")
        tensors = {name: memory.tensors[name] for name, _ in work.kept.tensor_places() if name in memory.tensors}
        if work.kept.server_parts:
            restores += _restores(memory, work)
        else:
            for name, _ in work.kept.tensor_places():
                if name in memory.servers:
                    factor = np.float32(layout.counted(work.bucket) if layout.mean else 1)
                    own, more = tensors.get(name, TensorMemory()), memory.servers[name] * factor
                    tensors[name] = own._replace(residual=more if own.residual is None else own.residual + more)
        work.kept.remember(tensors)
        prefix = f"{work.kept.exact_place}."
        work.kept.set_exact({int(place.removeprefix(prefix)): exact for place, exact in memory.exact.items() if place.startswith(prefix)})
    return restores


def _restores(memory: LayoutMemory, work: BucketWork) -> Iterator[Transfer]:
    tensors = [(place, memory.servers[name]) for name, place in work.kept.tensor_places() if name in memory.servers]
    for part in work.kept.server_parts:
        exact = memory.exact.get(_server_place(work, part))
        if exact is not None:
            yield from _pieces(part, 0, exact.bytes.view(np.float32), exact.rescale)
            continue
        for place, values in tensors:
            lo, hi = max(place.start, part.offset), min(place.stop, part.offset + part.numel)
            if lo < hi:
                yield from _pieces(part, lo - part.offset, values[lo - place.start : hi - place.start], 1.0)


def _pieces(part: Part, first: int, values: F32, rescale: float) -> Iterator[Transfer]:
    if first + values.size > part.numel:
        raise UsageError(f"the saved residual of key {key_text(part.key)} has {first + values.size} elements, the part {part.numel}")
    for lo in range(0, values.size, RESIDUAL_NUMEL):
        yield Transfer(part.key, first + lo, 0, payload=values[lo : lo + RESIDUAL_NUMEL].tobytes(), rescale=rescale)


def _server_place(work: BucketWork, part: Part) -> str:
    return f"server {work.bucket.index}.{(work.bucket.keys or work.bucket.parts).index(part)}"
