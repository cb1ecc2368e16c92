"""How a journal knows its job's token, and keeps the key of the payload connections, without either being in it. Pure.

Both come from the control connections' root, which is derived from token and job id slowly (``curve.root_of``): who finds a journal can guess tokens no
faster than who has recorded a handshake. A seal is used once: it has a random salt.
"""

from __future__ import annotations

import hmac
from typing import Final

from psgc.errors import PsgcError
from psgc.transport.security.curve import root_of
from psgc.transport.security.handshake import KEY_BYTES

SALT_BYTES: Final = 16


def digest(job: int, token: str) -> str:
    """Of a token; empty for none."""
    return hmac.digest(root_of(job, token), b"journal digest", "sha256").hex() if token else ""


def seal(job: int, token: str, key: bytes, salt: bytes) -> str:
    """The key under the token; without a token as it is, since then nothing is secret. salt: never used before."""
    return (salt + _masked(job, token, key, salt)).hex()


def unseal(job: int, token: str, sealed: str) -> bytes:
    """The key that was sealed under this token. Raises PsgcError for what is no seal."""
    try:
        data = bytes.fromhex(sealed)
    except ValueError:
        data = b""
    if len(data) != SALT_BYTES + KEY_BYTES:
        raise PsgcError("scheduler: the journal has no key of the payload connections")
    return _masked(job, token, data[SALT_BYTES:], data[:SALT_BYTES])


def _masked(job: int, token: str, key: bytes, salt: bytes) -> bytes:
    if not token:
        return key
    mask = hmac.digest(root_of(job, token), b"journal key" + salt, "sha256")
    return bytes(one ^ other for one, other in zip(key, mask, strict=True))
