"""BytePS's server and its scheduler, as processes of a ps-lite job: sockets around ``store``."""

from __future__ import annotations

import logging
import threading
import time

from psgc.config import Config
from psgc.processes.reminder import Reminder
from psgc.pslite.byteps.store import Store
from psgc.pslite.byteps.turns import ENDPOINT_NAME, refuse_races
from psgc.pslite.kv import KVServer
from psgc.pslite.nodes import WORKER_GROUP
from psgc.pslite.pairs import KVMeta, KVPairs
from psgc.pslite.postoffice import Postoffice
from psgc.pslite.settings import Settings

logger = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Take the part of a server or the scheduler, until all nodes of the job leave it. Raises ConfigError, PsgcError, or JobFailed for what ended it."""
    settings = Settings.of(config)
    logger.warning("%s", settings.warning)
    office = Postoffice(settings)
    try:
        if office.is_server:
            BytepsServer(office)
        office.start(barrier=False)
        refuse_races(office)
        office.barrier()
        office.finalize()  # waits for the workers, which call it when they are done
    finally:
        office.finalize(barrier=False)
    return 0


class BytepsServer:
    """Answers BytePS's requests, once the office has started."""

    def __init__(self, office: Postoffice) -> None:
        self._office = office
        office.endpoint_name = ENDPOINT_NAME
        self._store: Store | None = None
        self._reminder: Reminder | None = None
        self._lock = threading.Lock()  # the store is used by the customer's thread, and looked at by the van's
        office.on_tick = self._tick
        KVServer(office).set_request_handle(self._handle)

    def _handle(self, meta: KVMeta, pairs: KVPairs, server: KVServer) -> None:
        with self._lock:
            if self._store is None:
                own_keys = self._office.server_key_ranges()[self._office.my_rank]
                self._store = Store(self._office.node_ids(WORKER_GROUP), own_keys)
            answers = self._store.handle(meta, pairs, time.monotonic())
        for request, answer in answers:
            server.response(request, answer)

    def _tick(self, now: float) -> None:
        """Log the workers that this server waits for."""
        if self._store is None or not self._lock.acquire(blocking=False):
            return
        try:
            stalled = self._store.stalled(now, self._office.settings.silence_s)
        finally:
            self._lock.release()
        if not stalled:
            self._reminder = None
        else:
            self._reminder = self._reminder or Reminder(now - self._office.settings.silence_s)
            if self._reminder.due(now, self._office.settings.silence_s):
                logger.warning(
                    "server %d: %s%s", self._office.node_id, stalled[0], f", and {len(stalled) - 1} more" if len(stalled) > 1 else ""
                )
