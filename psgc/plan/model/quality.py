"""What compression costs besides time: which codecs are sound under which optimizer, how often a bucket is encoded, and the memory of residuals.

``psgc plan``, ``psgc advise`` and ``psgc whatif`` all use this module, so that they cannot disagree. Owns the list of sound codecs; the
measurements are in docs/quality.md and docs/optimizers.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from psgc.codecs.common.texts import split_text
from psgc.plan.model.level import EXACT, FAST, SAFE
from psgc.plan.model.options import encodes
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import PUBLISHED_BYTES

# Relative error ||decoded - values|| / ||values|| of one encoding of normally distributed values (``codecs.common.loss``; a test holds them), by codec text.
TYPICAL_ERROR: Final = {
    UNCOMPRESSED: 0.0, "fp16": 0.0002, "bf16": 0.0017, "int8": 0.007, "shared": 0.007, "fp8": 0.026, "int4": 0.118, "int4:rotate=1": 0.118,
    "dithering": 0.18, "onebit": 0.602, "topk:k=0.0625": 0.82, "topk:k=0.02": 0.92, "topk": 0.956,
}  # fmt: skip
# The level ``safe`` allows this relative error between a gradient and the aggregate where what is left out is sent later: what trains
# within the noise of seeds from the first step has at most 0.25 over two encodings, what does not has 0.7 and more (docs/quality.md).
SAFE_ERROR: Final = 0.3
SAFE_UNBIASED_ERROR: Final = (
    0.1  # where it is lost, but has no bias: dithering has 0.25, and is near the limit of noise at the end of a training
)
SAFE_BIASED_ERROR: Final = 0.01  # where it is lost: casts have 0.002, fp8 without feedback 0.03
CAST_OF: Final = {"float16": "fp16", "bfloat16": "bf16"}  # the cast that changes no gradient of this type
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


@dataclass(frozen=True, slots=True)
class Standard:
    """What a plan or advice may lose. level: see ``allowed``; adam: whether the optimizer is Adam-like, by which ``fast`` is judged where nothing runs
    that would compress in stages."""

    level: str = SAFE
    adam: bool = True

    def keeps(self, codec: str) -> bool:
        """Whether the codec meets it. Raises CodecError for an unknown codec."""
        if self.level == FAST:
            return is_sound(codec, adam=self.adam)
        _ = is_sound(codec, adam=True)  # raises
        return allowed(codec, self.level)

    @property
    def told(self) -> str:
        """Whose quality a codec that does not meet it costs, and what lets it in, as an end of a sentence."""
        if self.level == EXACT:
            return "changes gradients, which --quality exact does not allow"
        if self.level == SAFE:
            return "loses too much in a training's first steps (docs/quality.md); --quality fast --optimizer sgd lets it in"
        return (
            "costs quality under an Adam-like optimizer (--optimizer sgd if you train with SGD and momentum)"
            if self.adam
            else "costs quality"
        )


SAFELY: Final = Standard()
LENIENTLY: Final = Standard(FAST, adam=False)  # what training with SGD keeps its quality with in the end


def allowed(codec: str, level: str, *, encodings: int = 2, error: float | None = None, dtypes: Collection[str] = ()) -> bool:
    """Whether a job that leaves the choice to psgc may use the codec.

    level:     ``exact``: what changes no gradient: ``none``, and the cast to the type that all gradients have; ``safe``: what keeps training within the
               noise of seeds from the first step, under SGD with momentum and AdamW; ``fast``: every codec.
    encodings: lossy encodings between a gradient and the aggregate.
    error:     relative error of one encoding as measured; None: as of normally distributed values. A codec whose error is not known is not safe.
    dtypes:    of the gradients.
    """
    if codec == UNCOMPRESSED or level == FAST:
        return True
    if level == EXACT:
        return {codec} == {CAST_OF.get(dtype) for dtype in dtypes}
    return all(_half_is_safe(half, encodings, error) for half in codec.split("/") if half != RELAY)


def _half_is_safe(half: str, encodings: int, error: float | None) -> bool:
    name, parameters = split_text(half)
    one = TYPICAL_ERROR.get(half, math.inf) if error is None else error
    if name in CASTS or name in PUBLISHED_BYTES or half == UNCOMPRESSED:
        limit = SAFE_BIASED_ERROR
    else:
        from psgc.codecs.registry import parse_scheme  # which loads numba

        scheme = parse_scheme(half)
        limit = SAFE_ERROR if scheme.feedback else SAFE_UNBIASED_ERROR if scheme.unbiased else SAFE_BIASED_ERROR
    return "momentum" not in parameters and one * math.sqrt(encodings) <= limit


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
