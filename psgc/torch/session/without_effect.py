"""Warnings about what has no effect, once, by rank 0: PSGC_CODEC that the script overrides or does not use, BytePS's seed, priorities in a job without servers,
a script that synchronizes nothing.

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
_told: weakref.WeakKeyDictionary[Session, set[str]] = weakref.WeakKeyDictionary()  # what has been warned of
_synchronised: weakref.WeakSet[Session] = weakref.WeakSet()  # a session before it, which it goes on from, has synchronised something
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


def tell_seed(session: Session, option: str, value: object) -> None:
    """A codec is chosen by BytePS's options, with a seed among them."""
    _tell_once(session, "seed", f"{option}={value} has no effect: PSGC_SEED is the seed of all codecs; set it to {value} on every rank")


def tell_priority(session: Session, name: str, priority: int) -> None:
    """A push_pull has a priority."""
    if not session.config.servers:
        text = f"push_pull of {name!r}: priority={priority} has no effect: this job has no servers, and its ranks agree on one order of sending"
        _tell_once(session, "priority", text)


def _tell_once(session: Session, what: str, text: str) -> None:
    told = _told.setdefault(session, set())
    if session.rank == 0 and session.size > 1 and what not in told:
        told.add(what)
        logger.warning("%s", text)


def tell_start(config: Config) -> None:
    """At init: warn that a job of one worker compresses nothing."""
    asked = f"PSGC_PLAN={config.plan}" if config.plan else _asked(config) if config.codec != "none" else ""
    if config.solo and asked and (config.plan or _exists(config.codec)):
        logger.warning("%s has no effect: this is a job of one worker, and nothing is sent; `psgc run --workers 2` starts two", asked)


def carry_over(before: Session, now: Session) -> None:
    """After resume: what the script did in the session before it counts."""
    for known in (_settled, _synchronised):
        if before in known:
            known.add(now)
    if before.synchronised:
        _synchronised.add(now)


def tell_end(session: Session) -> None:
    """At the end of a session that has not failed."""
    if session.config.solo or session.rank != 0:
        return
    if not session.synchronised and session not in _synchronised:
        logger.warning(
            "rank %d: the script synchronised nothing: no gradient was sent, and each rank trained by itself; wrap its optimizer in "
            "psgc.torch.DistributedOptimizer, or its model by psgc.torch.ddp_hook",
            session.whole.rank,
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
