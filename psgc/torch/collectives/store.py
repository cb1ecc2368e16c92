"""What gloo finds its peers by: a store of torch.distributed over the job's own scheduler, which is authenticated."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store  # which torch.distributed passes on untyped

from psgc.worker.session import Session


class PublishedStore(Store):
    """A store whose keys are set once: that is all that gloo needs to connect. ``prefix`` tells apart what has other keys."""

    def __init__(self, session: Session, prefix: str) -> None:
        super().__init__()
        self._session, self._prefix = session, prefix
        self._known: dict[str, bytes] = {}  # gloo waits for each key, and then reads it

    def set(self, key: str, value: str | bytes) -> None:
        self._session.publish(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for the key. Raises JobFailed."""
        if key not in self._known:
            self._known[key] = self._session.lookup(self._prefix + key)
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """The scheduler limits how long a key is waited for."""
        for key in keys:
            self.get(key)
