"""Has this process's figures served for Prometheus while it is in a job (PSGC_METRICS_PORT)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Final

from psgc.observe.exporter import OF_WORKERS, Exporter, export
from psgc.observe.table import Family, member_families
from psgc.worker.session import Session

_exporters: Final[weakref.WeakKeyDictionary[Session, Exporter]] = weakref.WeakKeyDictionary()


def export_figures(session: Session) -> None:
    """Serve the session's figures until ``stop_exporting``, if that is asked for. A line says why it cannot be done. Nothing, where the process is alone."""
    if session.figures is None:
        return
    known = weakref.ref(session)

    def families() -> Iterable[Family]:
        member = known()
        report = None if member is None else member.report()
        return [] if member is None or report is None else member_families("worker", f"rank {member.rank}", member.config.job, report)

    exporter = export(session.config, OF_WORKERS + session.config.local_rank, families)
    if exporter is not None:
        _exporters[session] = exporter


def stop_exporting(session: Session) -> None:
    exporter = _exporters.pop(session, None)
    if exporter is not None:
        exporter.close()
