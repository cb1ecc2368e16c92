"""What does not go together with PSGC_ON_WORKER_LOSS other than stop: a process that takes a dead worker's place could not take part in it, nor could the
others go on without one."""

from __future__ import annotations

from psgc.errors import UsageError
from psgc.worker.session import Session


def refuse_replaceable(session: Session, what: str, instead: str = "") -> None:
    """Raise UsageError in a job whose workers may be followed by other processes. what: the call; instead: of it."""
    asked = session.config.on_worker_loss
    if asked != "stop" and session.size > 1:
        remedy = instead or "DistributedOptimizer can, with psgc.torch.Elastic; use these, or PSGC_ON_WORKER_LOSS=stop"
        if asked == "shrink":
            raise UsageError(f"{what}: under PSGC_ON_WORKER_LOSS=shrink the others could not go on without a worker that dies; {remedy}")
        raise UsageError(
            f"{what}: under PSGC_ON_WORKER_LOSS={asked} a process that takes a dead worker's place could not take part; {remedy}"
        )
