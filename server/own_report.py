"""What a server tells of itself once a heartbeat, and to whoever scrapes it."""

from __future__ import annotations

from psgc.observe.lately import Shares
from psgc.observe.others import beyond_others
from psgc.server.serving import Serving
from psgc.server.state import ServerState
from psgc.wire.reports import Report


class OwnReport:
    """See the module's text. slept_s: of the server's loop, so far. Any thread may ask for it."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.slept_s = 0.0
        self._shares = Shares()  # of its sums and of its loop's sleep
        self._leaving = Shares()  # by rank, of results on their way

    def make(self, now: float, admitted_at: float) -> Report:
        serving, engine = self._serving, self._serving.engine
        late: dict[str, list[float]] = {}
        sums, sleeps = 0.0, 1.0
        if serving.state is not None:
            late = self._late(serving.state, now)
            sums, sleeps = self._shares.grown(now, (serving.state.punctuality.folds.so_far_s(now), self.slept_s)) or (sums, sleeps)
        return Report(
            int(1e3 * (now - admitted_at)), serving.wire_bytes, busy_ms=engine.busy_ms, threads=engine.threads, folds=engine.folds, late=late,
            sums_permille=_permille(sums), loop_permille=_permille(1.0 - sleeps),
        )  # fmt: skip

    def _late(self, state: ServerState, now: float) -> dict[str, list[float]]:
        """As of ``Report.late``. Connections are only asked where somebody is late."""
        late_ms = state.punctuality.late_ms(now)
        if not late_ms:
            return {}
        links = [state.peers.get(rank) for rank in range(state.workers)]
        grown = self._leaving.grown(now, [0.0 if link is None or link.closed else link.leaving_s(now) for link in links])
        more = beyond_others(dict(enumerate(grown)))
        return {str(rank): [float(f"{number:.4g}") for number in (ms, min(1.0, more.get(rank, 0.0)))] for rank, ms in late_ms.items()}


def _permille(share: float) -> int:
    return round(1e3 * min(1.0, max(0.0, share)))
