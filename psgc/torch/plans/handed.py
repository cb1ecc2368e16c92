"""Rank 0's plan for every rank: published with the scheduler in pieces, and looked up by ranks that have none of their own.

A plan travels as compressed JSON. Owns the pieces' names, their sizes and the limits on what is taken from others.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Final

from psgc.errors import UsageError
from psgc.plan.model.plan import Plan
from psgc.plan.planfile.reading import read_plan
from psgc.plan.planfile.strict import MAX_BYTES, parse_strictly
from psgc.wire.messages import MAX_VALUE_BYTES
from psgc.worker.session import Session

MAX_PIECES: Final = 64  # 4 MiB compressed: a plan of 10,000 tensors in 60,000 parts takes a tenth of that


def hand_out(session: Session, name: str, plan: Plan) -> None:
    """Publish the plan under the name, for ``handed_out`` on the other ranks. Raises UsageError for one that is too large."""
    text = json.dumps(plan.to_json(), separators=(",", ":")).encode()
    packed = zlib.compress(text)
    pieces = [packed[at : at + MAX_VALUE_BYTES] for at in range(0, len(packed), MAX_VALUE_BYTES)]
    if len(pieces) > MAX_PIECES or len(text) > MAX_BYTES:
        raise UsageError(
            f"{name}: {len(text):,} bytes, {len(packed):,} compressed, are too many to hand out: at most {MAX_BYTES:,} and "
            f"{MAX_PIECES * MAX_VALUE_BYTES:,}; fuse tensors into fewer buckets"
        )
    for number, piece in enumerate(pieces):
        session.publish(f"{name}, piece {number}", piece)
    session.publish(name, json.dumps([len(pieces), hashlib.sha256(packed).hexdigest()]).encode())


def handed_out(session: Session, name: str) -> Plan:
    """The plan that rank 0 has published under the name, or will. Raises JobFailed, and UsageError for what is no plan."""
    count, digest = _head(session.lookup(name), name)
    packed = b"".join(session.lookup(f"{name}, piece {number}") for number in range(count))
    if hashlib.sha256(packed).hexdigest() != digest:
        raise UsageError(f"{name}: what arrived is not what rank 0 published; run one version of psgc everywhere")
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(packed, MAX_BYTES)
    except zlib.error as error:
        raise UsageError(f"{name}: what rank 0 published is no compressed plan: {error}") from None
    if inflater.unconsumed_tail or not inflater.eof:
        raise UsageError(f"{name}: it is longer than {MAX_BYTES >> 20} MiB, the most that a plan may be, or cut off")
    return read_plan(parse_strictly(text, name), name)


def _head(value: bytes, name: str) -> tuple[int, str]:
    """The number of pieces, and their digest."""
    head = parse_strictly(value, name)
    if not (isinstance(head, list) and len(head) == 2 and type(head[0]) is int and 0 < head[0] <= MAX_PIECES):
        raise UsageError(f"{name}: its number of pieces and digest are {head!r:.80}; run one version of psgc everywhere")
    return head[0], str(head[1])
