"""Which session a configuration asks for. Knows both kinds by name; loads the network only where there is one."""

from __future__ import annotations

from psgc.config import Config
from psgc.worker.session import Session
from psgc.worker.solo import SoloSession


def open_session(config: Config) -> Session:
    """Join the job that ``config`` names, or be alone. Raises ConfigError, or JobFailed saying who is missing."""
    if config.solo:
        config.require_alone()
        return SoloSession(config)
    if config.wire == "pslite":
        from psgc.worker.pslite.session import PsLiteSession

        return PsLiteSession.open(config)
    from psgc.worker.cluster import ClusterSession

    return ClusterSession.open(config)
