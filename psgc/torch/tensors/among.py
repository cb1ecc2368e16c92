"""``reduce``: means or sums of tensors among groups of ranks, for loops that shard a model by themselves.

Owns the names of such reductions. Each group has buckets of its own, of which its ranks alone are members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

import torch

from psgc.errors import UsageError
from psgc.layout import BucketSpec, Declaration
from psgc.torch.session import api
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.codec_text import CodecGiven, codec_text
from psgc.torch.tensors.declaring import declaration, spec_of
from psgc.torch.tensors.sent import TensorExchange
from psgc.worker.session import Session

INSTEAD: Final = "push_pull over all ranks can, in the loop of psgc.torch.Elastic; use these, or PSGC_ON_WORKER_LOSS=stop"

_exchanges: WeakKeyDictionary[Session, dict[str, tuple[Declaration, TensorExchange]]] = WeakKeyDictionary()


@uncompiled
def reduce(
    tensors: Sequence[torch.Tensor], groups: Sequence[Sequence[int]], name: str, average: bool = True, compression: CodecGiven = None
) -> None:
    """Overwrite these tensors with their means (or sums) over the ranks of this rank's group; waits for them.

    So a rank that holds a shard of a model's gradients, summed within its node, averages it with those that hold the same shard on other nodes:

        psgc.reduce([shard], [(0, 2), (1, 3)], "gradients", compression="int8")      # two nodes of two ranks

    tensors: floats or integers of any shapes, in the same order and of the same sizes on every rank of every group.
    groups:  ranks, each in one group at most. A rank in none keeps its tensors, and must call all the same. After
             ``init(mesh=...)`` they are numbers in this rank's group of the mesh, as ``rank()`` gives them.
    name:    the same on all ranks for the same tensors and groups; the first call of a name waits for all ranks to make it.
    compression: codec text, with error feedback where the codec has it. Tensors of fewer bytes than PSGC_MIN_COMPRESS_BYTES go uncompressed.
    Raises UsageError for groups that overlap or name ranks that the job lacks, and for a name used before for other tensors or groups; CodecError;
    LayoutMismatch where ranks differ, naming the first tensor. UsageError under PSGC_ON_WORKER_LOSS=wait and shrink.
    """
    session = api.current_session()
    session.check()
    refuse_replaceable(session, "reduce", INSTEAD)
    wanted = _declaration(session, tensors, _checked(groups, session), name, bool(average), compression)
    known = _exchanges.setdefault(session, {})
    before = known.get(name)
    if before is not None and before[0] != wanted:
        raise UsageError(f"reduce: {name!r} was of other tensors, groups or codecs before; give each reduction its own name")
    if not wanted.buckets:
        return
    if before is None:
        before = known[name] = wanted, TensorExchange(session, wanted)
    group = next((place for place, ranks in enumerate(groups) if session.rank in ranks), 0)
    before[1].run(tensors, first=group * len(tensors))


def _checked(groups: Sequence[Sequence[int]], session: Session) -> list[tuple[int, ...]]:
    found = [tuple(sorted(group)) for group in groups]
    ranks = [rank for group in found for rank in group]
    if not all(found) or len(set(ranks)) < len(ranks) or any(not 0 <= rank < session.size for rank in ranks):
        text = ", ".join(str(list(group)) for group in groups)
        raise UsageError(
            f"reduce: groups {text}: expected ranks from 0 to {session.size - 1}, each in one group at most, and no empty group"
        )
    return found


def _declaration(
    session: Session, tensors: Sequence[torch.Tensor], groups: Sequence[tuple[int, ...]], name: str, average: bool, compression: CodecGiven
) -> Declaration:
    specs = tuple(
        spec_of(tensor, f"{name}.{index}@{place}", f"reduce of {name!r}, tensor {index}")
        for place in range(len(groups)) for index, tensor in enumerate(tensors)
    )  # fmt: skip
    least, buckets = session.config.min_compress_bytes, list[BucketSpec]()
    for number, spec in enumerate(specs):
        tensor = tensors[number % len(tensors)]
        codec = codec_text(compression, spec.dtype) if tensor.numel() * tensor.element_size() >= least else "none"
        if spec.numel:
            buckets.append(BucketSpec((number,), codec, -number, members=groups[number // len(tensors)]))
    everything = tuple(range(len(specs)))
    return declaration(
        session, f"reduce.{name}", "plan", specs, "none", average, order=everything, used=everything, buckets=tuple(buckets)
    )  # fmt: skip
