"""Who has steps that do not wait for every rank (PSGC_BACKUP_WORKERS): gradients that DistributedOptimizer averages, and nothing else."""

from __future__ import annotations

from psgc.errors import UsageError
from psgc.layout.backup import NAME, check_count
from psgc.worker.session import Session


def backup_of(session: Session) -> int:
    """How many ranks' gradients a step need not wait for. Raises ConfigError for as many as there are."""
    backup = session.config.backup_workers
    if backup:
        check_count(backup, session.size)
    return backup


def refuse_backup(session: Session, what: str, instead: str = "use DistributedOptimizer") -> None:
    """Raise UsageError where steps are not to wait for every rank. what: the call, which cannot do that; instead: of it."""
    if session.config.backup_workers:
        raise UsageError(
            f"{what}: {NAME}={session.config.backup_workers} is for gradients that DistributedOptimizer averages; {instead}, or unset it"
        )
