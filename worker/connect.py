"""Which session a configuration asks for: that of a process that is alone, or that of a carrier."""

from __future__ import annotations

from importlib import import_module

from psgc.config import Config
from psgc.wire.carriers import MODULES
from psgc.worker.session import Session
from psgc.worker.solo import SoloSession


def open_session(config: Config) -> Session:
    """Join the job that ``config`` names, or be alone. Raises ConfigError, or JobFailed saying who is missing."""
    if config.solo:
        config.require_alone()
        return SoloSession(config)
    session: Session = import_module(MODULES[config.wire]).SESSION.open(config)
    return session
