"""Which tensors differ between ranks: each rank tells 16 bytes of each tensor, however large it is, and all find the same.

The digests are of bits: 0.0 and -0.0 differ, and so do two NaNs. Ranks are members of one job, so the digest need not resist those who look for two tensors
with one digest; that two of a job have one by accident is less likely than 2 ** -64.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.layout import TensorSpec
from psgc.torch.tensors.buffers import as_array, real_of
from psgc.torch.tensors.rank_table import SummedArray
from psgc.worker.session import DIGESTS_OF, Session
from psgc.worker.threads import pool_threads

LANES: Final = 2  # 64-bit integers that a digest is
DIGEST_BYTES: Final = 8 * LANES
PIECE_BYTES: Final = 8 << 20  # what a thread digests at once
SINGLE_MAX_BYTES: Final = 2 << 20  # of all tensors: below, threads take longer to start than they save


class ComparedTensors:
    """The comparison of a fixed list of tensors. Every rank makes it with the same ``name`` and number of tensors, tells its digests, and asks which differ."""

    def __init__(self, session: Session, name: str, specs: Sequence[TensorSpec]) -> None:
        self._session, self._specs = session, specs
        self._sums = SummedArray(session, f"{DIGESTS_OF}{name}.{len(specs)}", LANES * len(specs), "int64", "digests")

    def tell(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send this rank's digests."""
        self._own = digests(tensors, self._specs, pool_threads(self._session.config))
        self._sums.array[:] = self._own.reshape(-1)
        self._sums.leave()

    def differing(self) -> list[int]:
        """The indices of the tensors that are not the same on all ranks, ascending; once all ranks have told theirs. The same list on every rank."""
        return unequal(self._sums.arrive().reshape(self._own.shape), self._own, self._session.size)


def unequal(sums: NDArray[np.int64], own: NDArray[np.int64], ranks: int) -> list[int]:
    """The rows in which some rank has other digests. sums: over all ranks, modulo 2 ** 64; own: this rank's; both [tensors, LANES].

    Where all are alike, the sum is the number of ranks times one's own. Where not, it is so for no rank, unless digests that are as good as random hit one of
    few numbers of 128 bits: so all ranks find the same, without telling each other.
    """
    alike = own.view(np.uint64) * np.uint64(ranks)
    return [int(row) for row in np.flatnonzero((sums.view(np.uint64) != alike).any(axis=1))]


def digests(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], threads: int = 1) -> NDArray[np.int64]:
    """[tensors, LANES] int64: BLAKE2b of each one's name, dtype, shape and bytes in logical order. Tensors on a GPU are copied to the host, one at a time."""
    if threads == 1 or sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= SINGLE_MAX_BYTES:
        found = [_joined(spec, [_of_bytes(piece) for piece in _pieces(tensor)]) for tensor, spec in zip(tensors, specs, strict=True)]
    else:
        with ThreadPoolExecutor(threads, "psgc-digests") as pool:
            found = _by_threads(pool, 2 * threads, tensors, specs)
    return np.frombuffer(b"".join(found), "<i8").astype(np.int64).reshape(-1, LANES)


def _by_threads(pool: ThreadPoolExecutor, most: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> list[bytes]:
    """most: pieces that wait at once, and keep a tensor's copy alive."""
    under_way: deque[Future[bytes]] = deque()
    made: list[list[Future[bytes]]] = []
    for tensor in tensors:
        made.append([])
        for piece in _pieces(tensor):
            if len(under_way) >= most:
                under_way.popleft().result()
            made[-1].append(pool.submit(_of_bytes, piece))
            under_way.append(made[-1][-1])
    return [_joined(spec, [piece.result() for piece in pieces]) for spec, pieces in zip(specs, made, strict=True)]


def _pieces(tensor: torch.Tensor) -> Iterator[NDArray[Any]]:
    """The tensor's bytes in logical order, on the host."""
    flat = np.ascontiguousarray(as_array(real_of(tensor).cpu())).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES]


def _of_bytes(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _joined(spec: TensorSpec, pieces: Sequence[bytes]) -> bytes:
    return _of_bytes(f"{spec.name}\0{spec.dtype}\0{spec.shape}\0".encode() + b"".join(pieces))
