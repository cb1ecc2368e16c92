"""What compression costs besides time: which codecs are sound under which optimizer, how often a bucket is encoded, and the memory of residuals.

``psgc plan``, ``psgc advise`` and ``psgc whatif`` all use this module, so that they cannot disagree. Owns the list of sound codecs; the
measurements are in docs/quality.md and docs/optimizers.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from psgc.codecs.common.texts import split_text
from psgc.plan.model.options import encodes
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import PUBLISHED_BYTES

ADAM, SGD = "adam", "sgd"
OPTIMIZERS: Final = (ADAM, SGD)
CASTS: Final = frozenset({"bf16", "fp16"})
# Adam squares gradients, so only codecs with a small error are sound under it (docs/optimizers.md).
SOUND_UNDER_ADAM: Final = CASTS | {UNCOMPRESSED, "int8", "int4", "fp8", "shared"}
NEEDS_FEEDBACK_UNDER_ADAM: Final = frozenset({"int4"})
RELAY: Final = "relay"  # as a pull codec: servers forward payloads, so nothing is lost there
RESIDUAL_BYTES: Final = {"float32": 4.0, "int8": 1.0}


def is_sound(codec: str, *, adam: bool) -> bool:
    """Whether training with the codec keeps its quality. Both halves of a ``push/pull`` pair must be sound.

    Under an Adam-like optimizer, every payload must have a small error, and the codec must not apply momentum before compression. Under SGD with
    momentum, a small error, error feedback, or an unbiased codec is enough. Raises CodecError for an unknown codec."""
    return all(_half_is_sound(half, adam=adam) for half in codec.split("/") if half != RELAY)


def _half_is_sound(half: str, *, adam: bool) -> bool:
    name, parameters = split_text(half)
    small_error = name in SOUND_UNDER_ADAM and not (name in NEEDS_FEEDBACK_UNDER_ADAM and parameters.get("ef") == "0")
    if adam:
        return small_error and "momentum" not in parameters
    if small_error or name in PUBLISHED_BYTES:
        return True
    from psgc.codecs.registry import parse_scheme  # which loads numba

    scheme = parse_scheme(half)
    return scheme.feedback or scheme.unbiased


def is_cast(codec: str) -> bool:
    """Whether the codec only halves the bytes, by a cast to 16-bit floats."""
    return all(half.partition(":")[0] in CASTS for half in codec.split("/"))


def encodings(bucket: PlannedBucket) -> int:
    """How many lossy encodings lie between a worker's gradient and the aggregate: by workers, and by servers that encode the sum again."""
    again = any(".pull.c" in action for action in bucket.option) and _servers_encode(bucket.codec)
    return encodes(bucket.option) + again


def _servers_encode(codec: str) -> bool:
    if codec in PUBLISHED_BYTES:
        return True
    from psgc.codecs.registry import parse_scheme

    return codec.rpartition("/")[2] not in (UNCOMPRESSED, RELAY) and not parse_scheme(codec).additive


def keeps_residual(codec: str) -> bool:
    """Whether a worker keeps a residual for this codec."""
    return _residual_bytes(codec) > 0


def _residual_bytes(codec: str) -> float:
    """Bytes per element of a worker's residual."""
    if codec in PUBLISHED_BYTES:  # codecs without an implementation here; both have error feedback
        return RESIDUAL_BYTES["float32"]
    from psgc.codecs.registry import parse_scheme

    scheme = parse_scheme(codec)
    return RESIDUAL_BYTES[scheme.residual_dtype] if scheme.feedback else 0.0


def residual_bytes(buckets: Iterable[PlannedBucket]) -> float:
    """Bytes of one worker's residuals under this plan, if it encodes whole buckets. A worker whose options encode shards keeps less."""
    return sum(bucket.numel * _residual_bytes(bucket.codec) for bucket in buckets if encodes(bucket.option))


def server_residual_bytes(buckets: Iterable[PlannedBucket]) -> float:
    """Bytes of all servers' residuals together, for the sums that they encode."""
    total = 0.0
    for bucket in buckets:
        pull = bucket.codec.rpartition("/")[2]
        if encodings(bucket) > encodes(bucket.option) and keeps_residual(pull):
            total += RESIDUAL_BYTES["float32"] * bucket.numel
    return total
