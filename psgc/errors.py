"""Every error psgc raises on purpose: one root, then a class for each thing a caller would do differently."""

from __future__ import annotations


class PsgcError(Exception):
    """Root of all psgc errors. Its text is one line: what was expected, what came, whose it was, the remedy."""


class ConfigError(PsgcError):
    """The environment or a flag is wrong. Remedy: mend the setting the message names."""


class UsageError(PsgcError):
    """A call that psgc does not support. Remedy: change the calling code."""


class CodecError(PsgcError):
    """A codec's text form or parameter is wrong, or the codec cannot carry this tensor."""


class PayloadError(PsgcError):
    """Payload bytes are not what their codec writes: truncated, flipped or another codec's."""


class LayoutMismatch(PsgcError):
    """Ranks declared different tensors under one name. Remedy: build the same model on every rank."""


class ProtocolError(PsgcError):
    """A message broke the protocol; see its two subclasses for whose fault it was."""


class LocalProtocolError(ProtocolError):
    """Our own bug: psgc was about to send what the protocol forbids."""


class RemoteProtocolError(ProtocolError):
    """The peer's bytes are wrong: refuse them with a typed reply and keep serving.

    code: one of ``psgc.wire.messages.ErrorCode``, sent back to the peer.
    """

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class JobFailed(PsgcError):
    """The job has ended because of a fault somewhere; the text is the scheduler's reason.

    told: the launcher of this process knows, and will print it.
    """

    told: bool = False


class GroupError(PsgcError):
    """A collective of a group of ranks failed: which group, what was being done, and why."""


class NonFiniteError(PsgcError):
    """A gradient holds NaN or infinity and the policy is ``nonfinite=raise``."""


class DeviceError(PsgcError):
    """A GPU failed, or ran out of memory: which one, and how. Remedy: free memory, or leave the device out."""


def raised_alone(rank: int, place: str) -> str:
    """Why ranks cannot go on after a backward that raised on one of them, where others applied the step. place: the step and its tensor, in words."""
    return (
        f"rank {rank}: backward raised in {place} after some of its gradients had left, and the script went on without that step, which other ranks have "
        f"applied, so that weights differ; let the error end the script, or have every rank call put_back() in place of step()"
    )
