"""Encrypts payload connections with AES-256-GCM (PSGC_ENCRYPT=1): nobody on the path can read or alter payloads.

A message is its unencrypted header, the encrypted payload, and a tag of 16 bytes over both. Each connection has a key for each direction, and
the nonce is the message's number. So a nonce never repeats under a key, and a message that is left out, repeated or moved is detected at once.
Needs the package ``cryptography``, the extra ``encrypt``.
"""

from __future__ import annotations

import importlib.util
import struct
from typing import Any, Final

import numpy as np

from psgc.errors import ConfigError, RemoteProtocolError
from psgc.wire.messages import ErrorCode

TAG_BYTES: Final = 16
_NONCE: Final = struct.Struct("<IQ")


def require() -> None:
    """Raise ConfigError unless this Python can encrypt."""
    try:
        found = importlib.util.find_spec("cryptography") is not None
        if found:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            found = hasattr(AESGCM, "encrypt_into")
    except ImportError:
        found = False
    if not found:
        raise ConfigError(
            "PSGC_ENCRYPT=1 needs the package cryptography, 47 or newer, on every machine: pip install 'psgc[encrypt]'; or unset PSGC_ENCRYPT"
        )


class Cipher:
    """One end of one connection. sending, receiving: the keys of the two directions, 32 bytes each."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._sending, self._receiving = AESGCM(sending), AESGCM(receiving)
        self._sent = self._received = 0  # messages

    def seal(self, head: bytes, payload: Any) -> memoryview:
        """The next message's payload, encrypted (None: it has none), and its tag. Call it in the order in which messages are sent."""
        sealed = np.empty((0 if payload is None else len(payload)) + TAG_BYTES, np.uint8).data
        self._sending.encrypt_into(_NONCE.pack(0, self._sent), b"" if payload is None else payload, head, sealed)
        self._sent += 1
        return sealed

    def open(self, head: bytes, sealed: memoryview) -> None:
        """Decrypt the next message's payload in place; its tag stays behind it. Raises RemoteProtocolError if the message was altered."""
        from cryptography.exceptions import InvalidTag

        try:
            self._receiving.decrypt_into(_NONCE.pack(0, self._received), sealed, head, sealed[:-TAG_BYTES])
        except InvalidTag:
            raise RemoteProtocolError("a message was altered in the network: its tag is wrong", ErrorCode.MALFORMED) from None
        self._received += 1
