"""Where ranks that exchange rarely see whether all do the same: exchange a fragment, or finish. A rank that runs out of batches early finishes where others
exchange; without this both would wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psgc.errors import UsageError
from psgc.torch.tensors.push_pull import push_pull_async, synchronize
from psgc.worker.session import Session


class Rendezvous:
    """session: of the ranks that exchange, of which messages have the job's numbers; name: of whose exchanges these are; fragments: how many. Every rank
    enters once for each exchange of a fragment, and once when it finishes, for the exchange that would have come next."""

    def __init__(self, session: Session, name: str, fragments: int) -> None:
        self._session, self._name, self._fragments = session, name, fragments

    def enter(self, place: int, apart: Sequence[bool] | None = None) -> int:
        """At the fragment's exchange; or this rank finishes, and says of which fragments its parameters are apart from the outer ones. Returns a handle, and
        does not wait."""
        rank, finishes = self._session.whole.rank, apart is not None
        own = torch.tensor([finishes, rank if finishes else 0, *(apart or [False] * self._fragments)], dtype=torch.int64)
        return push_pull_async(own, average=False, name=f"{self._name}.{place}.met")

    def check(self, handle: int, step: int) -> list[bool]:
        """Wait for all ranks; of which fragments some finishing rank was apart. Raises UsageError where some finish and others exchange. step: this rank's."""
        sums = synchronize(handle)
        assert sums is not None
        finishing, ranks, *apart = sums.tolist()
        if finishing not in (0, self._session.size):
            who, own = f"rank {ranks} has" if finishing == 1 else f"{finishing} ranks have", self._session.whole.rank
            raise UsageError(
                f"DiLoCo: {who} finished, by finish() or at the end of the block, where others exchange (rank {own} is at its step {step}): every rank "
                f"must run the same number of steps"
            )
        return [bool(count) for count in apart]
