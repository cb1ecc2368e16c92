"""Warnings about settings without effect, once, by rank 0: PSGC_CODEC that the script overrides or does not use, a script that synchronizes nothing.

Owns the wording, and which sessions have used PSGC_CODEC. Knows no optimizers.
"""

from __future__ import annotations

import logging
import weakref

from psgc.codecs import BucketContext, parse_scheme
from psgc.codecs.jit.kernel import compiled_on_call
from psgc.config import Config
from psgc.errors import CodecError
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
_settled: weakref.WeakSet[Session] = weakref.WeakSet()  # PSGC_CODEC was used, or it was told that it was not


def choose(session: Session, compression: str | None, by: str) -> str:
    """The codec of gradients: the script's, else PSGC_CODEC. by: the call that may name one, as users write it."""
    asked = _asked(session.config)
    if compression is None:
        _settled.add(session)
        return session.config.codec
    if asked and session not in _settled and not session.config.solo:
        _settled.add(session)
        if session.rank == 0 and isinstance(compression, str) and _canonical(compression) != _canonical(session.config.codec):
            logger.warning("%s has no effect on %s: the script gives it %r; leave that out to use the setting", asked, by, compression)
    return compression


def tell_start(config: Config) -> None:
    """At init: warn that a job of one worker compresses nothing."""
    asked = f"PSGC_PLAN={config.plan}" if config.plan else _asked(config) if config.codec != "none" else ""
    if config.solo and asked and (config.plan or _exists(config.codec)):
        logger.warning("%s has no effect: this is a job of one worker, and nothing is sent; `psgc run --workers 2` starts two", asked)


def tell_end(session: Session) -> None:
    """At the end of a session that has not failed."""
    if session.config.solo or session.rank != 0:
        return
    if not session.synchronised:
        logger.warning(
            "rank 0: the script synchronised nothing: no gradient was sent, and each rank trained by itself; wrap its optimizer in "
            "psgc.torch.DistributedOptimizer, or its model by psgc.torch.ddp_hook"
        )
    elif (asked := _asked(session.config)) and session not in _settled and session.config.codec != "none":
        logger.warning("%s had no effect: no DistributedOptimizer and no ddp_hook of the script took it", asked)


def _canonical(codec: str) -> str:
    return parse_scheme(codec, BucketContext("float32")).canonical


def _exists(codec: str) -> bool:
    """Whether the codec exists. If it does not, the call that uses it raises the error; no warning is needed."""
    try:
        with compiled_on_call():
            parse_scheme(codec)
    except CodecError:
        return False
    return True


def _asked(config: Config) -> str:
    if not config.codec_given:
        return ""
    return f"PSGC_CODEC={config.codec_given}" + (" (--codec)" if config.launcher else "")
