"""Bodies of the conversation between a learner and a syncer, and the number that stands for a learner's name in a handshake.

PROTOCOL.md, *Learners and their syncer*, has the conversation.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import Final

from psgc.wire.messages import LEFT_OUT_IF_EMPTY

INITIAL: Final = 0  # the number of the push that brings the initial values
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Enrol:
    """A learner's REGISTER. session: drawn by its process, so that a push which it repeats is told from another process's. fragments: of each, its
    parameters as lines of name and shape; sizes: of each, its elements. codec: of what it pushes; answer: of what comes back."""

    name: str
    version: str
    session: int
    codec: str
    answer: str
    fragments: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Enrolled:
    """The answer, in LAYOUT, sent again where it changes. bring: the syncer has no values yet, and takes this learner's. rule: by which it applies what is
    pushed. awaits: the learner whose initial values it awaits."""

    bring: bool
    rule: str
    awaits: str = field(default="", metadata=LEFT_OUT_IF_EMPTY)


def is_name(text: str) -> bool:
    """Whether a learner may be called so: letters, digits, dots, dashes and underscores, 64 at most."""
    return _NAME.fullmatch(text) is not None


def learner_number(name: str) -> int:
    """What stands for the name where a handshake has a rank: 32 bits of its SHA-256."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def learner_key(token: str, number: int) -> bytes:
    """The key by which the learner whose name has this number proves itself, 32 bytes. The token never travels."""
    return hmac.digest(token.encode(), b"psgc/1 learner %d" % number, "sha256")
