"""What compression costs besides time: which codecs are sound under which optimizer, how often a bucket is encoded, what residuals take of memory.

``psgc plan``, ``psgc advise`` and ``psgc whatif`` all ask here, so that they cannot disagree. Owns the list of sound codecs; what was measured
is in docs/quality.md and docs/optimizers.md.
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
# Adam squares what it gets: only codecs with a small error are sound there (docs/optimizers.md).
SOUND_UNDER_ADAM: Final = CASTS | {UNCOMPRESSED, "int8", "int4", "fp8", "shared"}
NEEDS_FEEDBACK_UNDER_ADAM: Final = frozenset({"int4"})
RELAY: Final = "relay"  # as a pull codec: servers forward payloads, so nothing is lost there
RESIDUAL_BYTES: Final = {"float32": 4.0, "int8": 1.0}


def is_sound(codec: str, *, adam: bool) -> bool:
    """Whether the codec keeps quality. Under an Adam-like optimizer: a small error in every payload, and no momentum before compression. Under
    SGD with momentum: that, or error feedback, or no bias. Of ``push/pull`` both halves must be. Raises CodecError for an unknown codec."""
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
    """How often a value of the bucket is encoded between one worker's gradient and the aggregate, each time with a loss: by workers, and by
    servers that encode the sum again."""
    again = any(".pull.c" in action for action in bucket.option) and _servers_encode(bucket.codec)
    return encodes(bucket.option) + again


def _servers_encode(codec: str) -> bool:
    if codec in PUBLISHED_BYTES:
        return True
    from psgc.codecs.registry import parse_scheme

    return codec.rpartition("/")[2] not in (UNCOMPRESSED, RELAY) and not parse_scheme(codec).additive


def keeps_residual(codec: str) -> bool:
    """Whether a worker keeps what the codec of its push has not sent yet."""
    return _residual_bytes(codec) > 0


def _residual_bytes(codec: str) -> float:
    """A worker's bytes an element."""
    if codec in PUBLISHED_BYTES:  # known by their published times alone; both have error feedback
        return RESIDUAL_BYTES["float32"]
    from psgc.codecs.registry import parse_scheme

    scheme = parse_scheme(codec)
    return RESIDUAL_BYTES[scheme.residual_dtype] if scheme.feedback else 0.0


def residual_bytes(buckets: Iterable[PlannedBucket]) -> float:
    """Memory of one worker for residuals under this plan, a worker that encodes whole buckets: those of options that encode shards keep less."""
    return sum(bucket.numel * _residual_bytes(bucket.codec) for bucket in buckets if encodes(bucket.option))


def server_residual_bytes(buckets: Iterable[PlannedBucket]) -> float:
    """Memory of all servers together for residuals of the sums that they encode."""
    total = 0.0
    for bucket in buckets:
        pull = bucket.codec.rpartition("/")[2]
        if encodings(bucket) > encodes(bucket.option) and keeps_residual(pull):
            total += RESIDUAL_BYTES["float32"] * bucket.numel
    return total
