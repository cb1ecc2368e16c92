"""Which tensors share a bucket, where neither a plan nor the order of readiness says: by a rule, or by the order in which forward needs them.

Tensors of a bucket have one codec, dtype and parameter group, so that all ranks, which declare the same buckets, need no order of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from psgc.layout import ITEM_BYTES, BucketSpec, TensorSpec

# A bucket leaves with its last gradient, which is that of its first layer, and the next forward waits for all of it; so layers share less than otherwise.
MOST_FUSED_BYTES: Final = 512 << 10
# A tensor this many times smaller than the large one before it (a bias beside its weight) shares that one's bucket: own messages would cost more.
ALONG: Final = 16


def nbytes_of(spec: TensorSpec) -> int:
    return spec.numel * ITEM_BYTES[spec.dtype]


def buckets_by_codec(specs: Sequence[TensorSpec], codecs: Sequence[str], fuse_bytes: int) -> tuple[BucketSpec, ...]:
    """In the reverse order of ``specs``, in which backward makes gradients ready, nearly. codecs: of each tensor."""
    buckets: list[tuple[str, list[int]]] = []
    open_: dict[tuple[str, str, int], tuple[list[int], int]] = {}  # the bucket that is being filled, and its bytes so far
    for index in reversed(range(len(specs))):
        nbytes = nbytes_of(specs[index])
        if not nbytes:
            continue
        kind = codecs[index], specs[index].dtype, specs[index].group
        members, filled = open_.get(kind, ([], 0))
        if not members or filled + nbytes > fuse_bytes:
            members, filled = [], 0
            buckets.append((codecs[index], members))
        members.append(index)
        open_[kind] = members, filled + nbytes
    return tuple(BucketSpec(tuple(members), codec, -number) for number, (codec, members) in enumerate(buckets))


def buckets_in_order(
    specs: Sequence[TensorSpec], codecs: Sequence[str], order: Sequence[int], used: Collection[int], fuse_bytes: int, min_compress_bytes: int
) -> tuple[BucketSpec, ...]:  # fmt: skip
    """Neighbours in the order share buckets, apart by kind. A bucket of tensors from all over the model would leave with the last gradient, and the first layer
    would wait for it. Parameters without a gradient (those that are not ``used``) are by themselves, so that no one gives them zeros. min_compress_bytes: what
    is smaller goes uncompressed."""
    buckets: list[BucketSpec] = []
    near: list[int] = []
    limit = room = min(fuse_bytes, MOST_FUSED_BYTES)
    filled = 0

    def close() -> None:
        kinds: dict[tuple[str, str, int], list[int]] = {}
        for member in near:
            kinds.setdefault((codecs[member], specs[member].dtype, specs[member].group), []).append(member)
        for (codec, _, _), members in kinds.items():
            small = sum(nbytes_of(specs[member]) for member in members) < min_compress_bytes
            buckets.append(BucketSpec(tuple(members), "none" if small else codec, -len(buckets)))
        near.clear()

    for index in order:
        nbytes = nbytes_of(specs[index])
        if not nbytes:
            continue
        if filled + nbytes > room or index not in used or (near and near[-1] not in used):
            close()
            filled = 0
            room = max(limit, nbytes + nbytes // ALONG) if limit else 0
        near.append(index)
        filled += nbytes
    close()
    return tuple(buckets)
