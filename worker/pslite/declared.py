"""What has been declared over ps-lite: layouts, and their buckets, which layouts of the same tensors have in common.

BytePS has one key for each name. So a tensor that is declared again, as by broadcasts from two roots, goes on with the bucket that it had before, and with the
rounds of its keys. Invariant: a bucket's parts are known to ``PsLiteServers`` before its first step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import numpy as np

from psgc.config import Config
from psgc.errors import UsageError
from psgc.layout import Bucket, Declaration, Layout
from psgc.layout.byteps_hash import HashPlacement
from psgc.layout.machines import Machines
from psgc.pslite.byteps.commands import PART_BYTES, part_bound
from psgc.pslite.byteps.turns import keys_of
from psgc.worker.executor.bucket import BucketWork
from psgc.worker.executor.location import OnHost
from psgc.worker.pslite.compression import Compression
from psgc.worker.pslite.numbering import CARRIED_AS, Numbering
from psgc.worker.pslite.part import PsLitePart
from psgc.worker.pslite.servers import PsLiteServers, WireKey
from psgc.worker.residuals.kept import Kept


class Declared:
    """See the module's text. two_key_servers: the servers' ranks, known once the job is complete."""

    def __init__(self, config: Config, servers: PsLiteServers) -> None:
        self._rank, self._size, self._seed, self._servers = config.node, config.nodes, config.seed, servers
        self.two_key_servers: frozenset[int] = frozenset()
        placement = HashPlacement.parse(config.hashed or "djb2")
        placement.check(config.servers, config.nodes)
        # BytePS's mixed mode has the servers on machines without workers first; ps-lite's scheduler orders them so.
        apart = max(config.servers - config.nodes, 0)
        machines = Machines(tuple(range(config.servers)), (0,) * apart + (1,) * config.nodes, config.nodes)
        self.numbering = Numbering(placement, machines, part_bound(config.part_bytes if config.part_bytes_given else PART_BYTES))
        self._lock = threading.Lock()
        self._declared: dict[str, tuple[Declaration, Layout]] = {}
        self._works: dict[int, BucketWork] = {}  # by the first part's key

    def expect(self, names: Iterable[str]) -> None:
        """See ``Session.expect_names``."""
        with self._lock:
            self.numbering.expect(names)

    @property
    def any(self) -> bool:
        """Whether tensors other than broadcasts have been declared."""
        return any(declaration.kind != "broadcast" for declaration, _ in self._declared.values())

    @property
    def works(self) -> list[BucketWork]:
        return list(self._works.values())

    def work(self, layout: Layout, bucket: Bucket) -> BucketWork:
        """The bucket's work, which may be that of another layout's bucket."""
        return self._works[bucket.parts[0].key]

    def lay_out(self, declaration: Declaration, added: Callable[[Layout], None]) -> Layout:
        """The declaration's layout. The servers are told of new buckets, and then ``added`` is called with the layout. Raises UsageError, CodecError."""
        with self._lock:
            known = self._declared.get(declaration.name)
            if known is not None:
                declaration.check_same(known[0])
                return known[1]
            compression = Compression("none" if declaration.kind == "broadcast" else declaration.codec, self._seed)
            layout, places = self.numbering.layout(declaration, len(self._declared), self._size)
            keys = [[keys_of(place, self.two_key_servers) for place in parts] for parts in places]
            made = [self._bucket(layout, bucket, own, compression) for bucket, own in zip(layout.buckets, keys, strict=True)]
            self._declared[declaration.name] = (declaration, layout)
            fresh = [(bucket, own) for bucket, own, work in zip(layout.buckets, keys, made, strict=True) if work.kept.layout is layout]
            self._works |= {bucket.parts[0].key: work for bucket, work in zip(layout.buckets, made, strict=True)}
            if fresh:
                added(layout)
            for bucket, own in fresh:
                self._tell(layout, bucket, own, compression if bucket.codec != "none" else None)
        return layout

    def _bucket(self, layout: Layout, bucket: Bucket, keys: list[tuple[int, ...]], compression: Compression) -> BucketWork:
        """A tensor that is declared again, as by broadcasts from two roots, goes on with the rounds of its keys. Raises UsageError, CodecError."""
        known = self._works.get(bucket.parts[0].key)
        if known is None:
            own = zip(bucket.parts, keys, strict=True)
            compressors = [compression.compressor(part.numel, len(each)) if bucket.codec != "none" else None for part, each in own]
            parts = [PsLitePart(layout, bucket, part, self._rank, c) for part, c in zip(bucket.parts, compressors, strict=True)]
            kept = Kept(layout, bucket, (), True, (), "", goes_back=False)
            return BucketWork(parts, [[(part.offset, part.numel)] for part in bucket.parts], kept, OnHost())
        if (known.bucket.dtype, known.bucket.codec, known.layout.mean) != (bucket.dtype, bucket.codec, layout.mean):
            raise UsageError(
                f"tensor {layout.tensor_at(bucket, 0)!r} was exchanged before with another dtype, codec or average, but BytePS has one key for each name; "
                f"use another name"
            )
        return known

    def _tell(self, layout: Layout, bucket: Bucket, keys: list[tuple[int, ...]], compression: Compression | None) -> None:
        """Tell the servers of a bucket's parts. Few tensors are broadcast twice: the second keys of a broadcast's parts wait for that."""
        for part, own in zip(bucket.parts, keys, strict=True):
            wire = CARRIED_AS[bucket.dtype]
            of = [WireKey(key, None if compression is None else compression.registration_of(turn)) for turn, key in enumerate(own)]
            self._servers.add(part.numel * np.dtype(wire).itemsize, wire, of, 1 if layout.kind == "broadcast" else len(own))
