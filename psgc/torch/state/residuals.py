"""The residuals (and other state of codecs) of an optimizer's tensors: collected for saving, and restored into any layout.

Owns one kind of tensors' layouts (the gradients, or an optimizer's momenta) and what has been loaded for layouts that are not declared
yet. ``saved`` owns the form in which it is saved. A layout that was saved is declared as it was where that can be; then the job goes on
bit for bit. Otherwise each tensor's share moves into its new bucket, and the sum over all ranks and servers stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np

from psgc.errors import UsageError
from psgc.layout import Bucket, BucketSpec, Declaration, Layout, TensorSpec, build_layout, equal_parts
from psgc.worker.residuals.residual import F32, ExactResidual, LayoutMemory, TensorMemory
from psgc.worker.session import Session

Memories = dict[str, TensorMemory]
Value = TypeVar("Value")


@dataclass(slots=True)
class KeptLayout:
    """A layout to be declared again. declaration: with its buckets, the steps taken, the seed and the first server; planned: whether
    its buckets were a plan's; workers: how many there were; exact: as LayoutMemory's."""

    declaration: Declaration
    planned: bool
    workers: int
    exact: dict[str, ExactResidual] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {tensor.name for tensor in self.declaration.tensors}

    def again(self, default: Declaration, workers: int) -> Declaration | None:
        """Its declaration for the tensors of ``default`` that it has; None if today's settings ask for another layout of them."""
        mine, found = self.declaration, {tensor.name: tensor for tensor in default.tensors}
        same = (mine.kind, mine.codec, mine.mean, mine.part_bytes, mine.fuse_bytes, mine.min_compress_bytes) == (
            default.kind, default.codec, default.mean, default.part_bytes, default.fuse_bytes, default.min_compress_bytes,
        )  # fmt: skip
        if not same or self.workers != workers or self.planned != bool(default.buckets):
            return None
        if any(found.get(tensor.name) != tensor for tensor in mine.tensors):
            return None
        mine = replace(mine, backup=default.backup)
        if not default.buckets:
            return mine
        if len(found) != len(mine.tensors) or cuts(default, workers) != cuts(mine, workers):
            return None
        planned = sorted(default.buckets, key=lambda spec: -spec.priority)  # as ``mine`` has them
        return replace(mine, buckets=tuple(replace(b, servers=p.servers) for b, p in zip(mine.buckets, planned, strict=True)))


def cuts(declaration: Declaration, workers: int) -> list[tuple[object, ...]]:
    """What determines a layout's payload bytes, on whichever servers: each bucket's tensors by name, its codec and option, whose
    it is, and where its parts begin."""
    layout = build_layout(_anywhere(declaration), layout_id=0, servers=1, workers=workers)
    return [
        (
            tuple(name for name, _ in layout.places(bucket)),
            bucket.codec,
            bucket.option,
            bucket.turns,
            bucket.members,
            tuple((part.offset, part.numel) for part in bucket.parts),
        )
        for bucket in layout.buckets
    ]


def _anywhere(declaration: Declaration) -> Declaration:
    """The declaration without the servers that a plan names."""
    return replace(declaration, buckets=tuple(replace(spec, servers=()) for spec in declaration.buckets))


@dataclass(slots=True)
class Kept:
    """One rank's saved state of one kind of tensors. tensors, servers: by name, as LayoutMemory's."""

    tensors: Memories = field(default_factory=dict)
    servers: dict[str, F32] = field(default_factory=dict)
    layouts: list[KeptLayout] = field(default_factory=list)


def among(kept: Kept, before: int, now: int) -> Kept:
    """What one rank has kept among ``before`` workers, to go on among ``now``, of whom nobody else need go on.

    A worker's residual e of W workers has the weight e / W in the mean, a server's residual f the weight f. So the rank that takes both along goes on from
    e W' / W + f W' among W' workers: the sum of all steps stays what it was. What a rank keeps that does not go on is lost, as an error of one step is."""
    tensors: Memories = {}
    for name in kept.tensors.keys() | kept.servers.keys():
        own, share = kept.tensors.get(name, TensorMemory()).residual, kept.servers.get(name)
        parts = [] if own is None else [own * np.float32(now / before)]
        total: F32 = np.asarray(sum(parts if share is None else [*parts, share * np.float32(now)]), np.float32)
        if total.any():
            tensors[name] = TensorMemory(total)
    return Kept(tensors)


class Residuals:
    """Of the layouts of one optimizer that share a set of tensor names."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._layouts: list[tuple[Layout, Declaration, bool]] = []  # and whether the buckets are a plan's
        self._replaced: list[Layout] = []  # until every rank has declared another
        self._waiting = Kept()  # for tensors that are in no layout yet
        # A state has been loaded, or a layout given up, on all ranks, which take it up together; or this rank alone goes on from another session's.
        self._loading: Literal["", "together", "alone"] = ""

    def declarations(self, default: Declaration, name: Callable[[], str]) -> Iterator[tuple[Declaration, tuple[int, ...]]]:
        """What to declare, one after the other, for the tensors of ``default``, each with its tensors' indices among them: layouts as
        they were saved, and ``default`` for the tensors that are left. name: gives each a name of its own."""
        indices = {tensor.name: index for index, tensor in enumerate(default.tensors)}
        for kept in list(self._waiting.layouts):
            again = kept.again(default, self._session.size)
            if again is not None and kept.names <= indices.keys():
                members = tuple(indices.pop(tensor.name) for tensor in again.tensors)
                yield replace(again, name=name()), members
        if len(indices) == len(default.tensors):
            yield self._going_on(replace(default, name=name())), tuple(indices.values())
        elif indices:
            yield self._going_on(replace(_only(default, tuple(indices.values())), name=name())), tuple(indices.values())

    def declaration(self, default: Declaration) -> Declaration:
        """What to declare for exactly the tensors of ``default``, in this order."""
        for kept in self._waiting.layouts:
            again = kept.again(default, self._session.size)
            if again is not None and again.tensors == default.tensors:
                return replace(again, name=default.name)
        return self._going_on(default)

    def _going_on(self, default: Declaration) -> Declaration:
        """A layout of its own, whose random streams and warm-ups go on all the same."""
        saved = [kept.declaration for kept in self._waiting.layouts]
        if not saved:
            return default
        return replace(default, seed=saved[0].seed, past_steps=max(declaration.past_steps for declaration in saved))

    def add(self, layout: Layout, declaration: Declaration) -> None:
        """Add a new layout, declared by ``declaration``; its tensors that have a saved state resume from it."""
        names, waiting = {tensor.name for tensor in layout.tensors}, self._waiting
        declared = _anywhere(declaration)
        same = next((kept for kept in waiting.layouts if replace(kept.declaration, name=declaration.name) == declared), None)
        for replaced in self._replaced:  # every rank has declared the new one, and so has taken its last step of these
            self._session.retire(replaced)
        self._replaced.clear()
        self._layouts.append((layout, declaration, bool(declaration.buckets) if same is None else same.planned))
        if not self._loading:
            return
        memory = LayoutMemory(_take(waiting.tensors, names), _take(waiting.servers, names))
        check_sizes(layout.tensors, memory)
        if same is not None:
            memory.exact = same.exact
        waiting.layouts = [kept for kept in waiting.layouts if not kept.names <= names]
        if self._session.incarnation > 1 and self._session.progress.steps.get(layout.name):
            return  # the process whose place this one has taken went on from it, steps ago; what codecs keep begins anew
        self._session.remember(layout, memory, alone=self._loading == "alone")

    def collect(self, dropped: bool, forgotten: bool = False) -> Kept:
        """What is kept now. dropped: the trainer did not apply the last step's result. forgotten: the next step would have forgotten residuals and
        velocities (``skips``), which are zeros then."""
        waiting = self._waiting
        kept = Kept(dict(waiting.tensors), dict(waiting.servers), list(waiting.layouts))
        for layout, declaration, planned in self._layouts:
            memory = self._session.remembered(layout, dropped)
            kept.tensors |= memory.tensors
            kept.servers |= memory.servers
            again = _declared(layout, declaration, planned, memory.steps)
            kept.layouts.append(KeptLayout(again, planned, layout.workers, memory.exact))
        if forgotten:
            kept.tensors = {name: _forgotten(memory) for name, memory in kept.tensors.items()}
            kept.servers = {name: np.zeros_like(values) for name, values in kept.servers.items()}
            kept.layouts = [replace(layout, exact={}) for layout in kept.layouts]
        return kept

    def restore(self, kept: Kept) -> None:
        """Resume from this state; tensors that are not in it begin without one. Existing layouts are dropped, and their tensors are
        declared anew. Every rank must call it."""
        self._replaced += [layout for layout, _, _ in self._layouts]
        self._waiting, self._layouts, self._loading = kept, [], "together"

    def bring(self, kept: Kept) -> None:
        """Go on from this state, which has nothing of servers', before any layout is declared. Other ranks need not."""
        if kept.tensors:
            self._waiting, self._loading = kept, "alone"

    def replace(self, dropped: bool = False) -> None:
        """Drop the layouts; their tensors' states are kept for the layout that is declared next. Every rank must call it. dropped: as of ``collect``."""
        if self._layouts:
            self.restore(self.collect(dropped))


def _forgotten(memory: TensorMemory) -> TensorMemory:
    residual, velocity = (None if values is None else np.zeros_like(values) for values in (memory.residual, memory.velocity))
    return memory._replace(residual=residual, velocity=velocity)


def _take(found: dict[str, Value], names: set[str]) -> dict[str, Value]:
    return {name: found.pop(name) for name in list(found) if name in names}


def _only(default: Declaration, indices: tuple[int, ...]) -> Declaration:
    """The declaration of some of its tensors."""
    places = {index: place for place, index in enumerate(indices)}
    return replace(
        default, tensors=tuple(default.tensors[i] for i in indices), order=tuple(places[i] for i in default.order if i in places),
        used=tuple(places[i] for i in default.used if i in places),
    )  # fmt: skip


def _declared(layout: Layout, declaration: Declaration, planned: bool, steps: int) -> Declaration:
    """The declaration that gives the same layout again: its buckets are listed, not derived from an order. An option that no plan gave, since the job
    has no servers, is left out: another job chooses its own."""
    everything = tuple(range(len(layout.tensors)))
    given = sorted(declaration.buckets, key=lambda spec: -spec.priority) if planned else [None] * len(layout.buckets)
    return replace(
        declaration, order=everything, used=everything, buckets=tuple(map(_bucket_spec, layout.buckets, given)), seed=layout.seed,
        stream=layout.stream, past_steps=steps, turn=layout.turn,
    )  # fmt: skip


def _bucket_spec(bucket: Bucket, given: BucketSpec | None) -> BucketSpec:
    """given: as the plan has the bucket."""
    sizes = [part.numel for part in bucket.parts if part.round == 0]
    equal = sizes == equal_parts(bucket.numel, len(sizes))
    spec = BucketSpec(bucket.tensors, bucket.codec, bucket.priority, len(sizes), 0 if equal else sizes[0], members=bucket.members)
    return spec if given is None else replace(spec, option=given.option, turns=given.turns)


def check_sizes(tensors: Iterable[TensorSpec], memory: LayoutMemory | Kept) -> None:
    """Raise UsageError, naming the tensor, for a memory of a tensor of another size."""
    for tensor in tensors:
        own = memory.tensors.get(tensor.name, TensorMemory())
        for values in (own.residual, own.velocity, memory.servers.get(tensor.name)):
            if values is not None and values.size != tensor.numel:
                raise UsageError(
                    f"the saved residual of {tensor.name!r} has {values.size} elements, the tensor {tensor.numel}; "
                    f"is it another model's? leave load_residual_state_dict() out to begin with empty residuals"
                )
