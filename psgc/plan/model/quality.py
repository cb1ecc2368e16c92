"""What compression costs besides time: which codecs are sound under which optimizer, how often a bucket is encoded, and the memory of residuals.

``psgc plan``, ``psgc advise``, ``psgc whatif`` and the warnings of running jobs all use this module, so that they cannot disagree. Owns the list of sound
codecs and of what codecs lose; the measurements are in docs/quality.md, docs/codecs.md and docs/optimizers.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from psgc.codecs.common.parameters import MOMENTUM_DEFAULTS
from psgc.codecs.common.texts import join_text, split_text
from psgc.codecs.table import CODECS, OF_KIT, SCHEMES
from psgc.errors import CodecError
from psgc.plan.inputs.profile import PUBLISHED_BYTES
from psgc.plan.model.level import EXACT, FAST, SAFE
from psgc.plan.model.options import encodes
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket

# Relative error ||decoded - values|| / ||values|| of one encoding of normally distributed values (``codecs.common.loss``; a test holds them), by canonical
# text. ``typical_error`` looks it up.
TYPICAL_ERROR: Final = {
    UNCOMPRESSED: 0.0, "fp16": 0.0002, "bf16": 0.0017,
    "int8": 0.007, "int8:rotate=1": 0.007, "int8:ef=0": 0.0097, "int8:ef=0,rotate=1": 0.0097, "shared": 0.007, "shared:ef=0": 0.0097,
    "fp8": 0.026, "fp8:format=e5m2": 0.052, "fp8:ef=0": 0.037, "fp8:ef=0,format=e5m2": 0.074,
    "int4": 0.118, "int4:rotate=1": 0.118, "int4:ef=0": 0.164, "int4:ef=0,rotate=1": 0.164,
    "dithering": 0.18, "dithering:partition=natural": 0.28, "dithering:k=1": 1.19, "tbq": 0.59, "onebit": 0.602, "onebit:ef=0,scale=unit": 0.637,
    "topk:k=0.0625": 0.82, "topk:k=0.02": 0.92, "topk": 0.956, "topk:select=sampled": 0.96, "topk:select=mstopk": 0.957, "blocktopk": 0.992, "randomk": 0.994,
    "randomk:ef=0": 10.4,
}  # fmt: skip
# Parameters that change no payload's error: what a worker keeps, and a warm-up, during which payloads lose less.
_WITHOUT_ERROR: Final = frozenset({*MOMENTUM_DEFAULTS, "warmup", "beta"})
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
LEAST_RANK_UNDER_ADAM: Final = 16  # of powersgd, with feedback: rank 8 is beyond the spread of seeds (docs/codecs.md)
RELAY: Final = "relay"  # as a pull codec: servers forward payloads, so nothing is lost there
RESIDUAL_BYTES: Final = {"float32": 4.0, "int8": 1.0}


def is_sound(codec: str, *, adam: bool) -> bool:
    """Whether training with the codec keeps its quality. Both halves of a ``push/pull`` pair must be sound.

    Under an Adam-like optimizer, every payload must have a small error, and the codec must not apply momentum before compression. Under SGD with
    momentum, a small error, error feedback, or an unbiased codec is enough. Raises CodecError for an unknown codec."""
    return all(_half_is_sound(half, adam=adam) for half in codec.split("/") if half != RELAY)


class _Half(NamedTuple):
    """One side of a pair, in canonical form: parameters at their default are left out."""

    name: str
    parameters: dict[str, str]

    @property
    def remembers(self) -> bool:
        """Whether momentum is applied before compression."""
        return "momentum" in self.parameters


@functools.cache
def _half(text: str) -> _Half:
    """Raises CodecError for an unknown codec."""
    name, parameters = split_text(text)
    if not parameters and (name in SOUND_UNDER_ADAM or name in PUBLISHED_BYTES):
        return _Half(name, {})  # without numba
    from psgc.codecs.registry import parse_scheme  # which loads numba

    return _Half(*split_text(parse_scheme(text).canonical.partition("/")[0]))


def typical_error(half: str) -> float | None:
    """The relative error of one encoding by this side of a pair; None if it is not known. Raises CodecError for an unknown codec."""
    if half in TYPICAL_ERROR:
        return TYPICAL_ERROR[half]
    name, parameters = _half(half)
    kept = {key: value for key, value in parameters.items() if key not in _WITHOUT_ERROR}
    found = TYPICAL_ERROR.get(join_text(name, kept))
    if found is not None or kept.pop("ef", "1") == "1":
        return found
    from psgc.codecs.registry import parse_scheme

    # Without feedback the payload is the same, unless values are then drawn at random between two neighbours, which errs more.
    return None if parse_scheme(half).unbiased else TYPICAL_ERROR.get(join_text(name, kept))


def _known_error(half: str) -> float | None:
    """The same, and None for what is no codec of this process: a profile may have times of any."""
    try:
        return typical_error(half)
    except CodecError:
        return None


def _half_is_sound(half: str, *, adam: bool) -> bool:
    found = _half(half)
    name, parameters = found
    with_feedback = parameters.get("ef") != "0"
    small_error = name in SOUND_UNDER_ADAM and (with_feedback or name not in NEEDS_FEEDBACK_UNDER_ADAM)
    if name == "powersgd":
        small_error = with_feedback and int(parameters.get("rank", "0")) >= LEAST_RANK_UNDER_ADAM
    if adam:
        return small_error and not found.remembers
    if small_error or name in PUBLISHED_BYTES:
        return True
    from psgc.codecs.registry import parse_scheme  # which loads numba

    scheme = parse_scheme(half)
    return scheme.feedback or scheme.unbiased


def known_loss(codec: str, unknown: float) -> float:
    """The larger relative error of both halves; unknown: in place of one that is not known."""
    errors = [_known_error(half) for half in codec.split("/") if half != RELAY]
    return max(unknown if error is None else error for error in errors)


def costs_under_adam(codec: str) -> bool:
    """Whether a job should be warned of the codec under an Adam-like optimizer: it is one of psgc's, and not sound there. What others' codecs lose is not
    known here. Raises CodecError for an unknown codec."""
    halves = [half for half in codec.split("/") if half != RELAY and split_text(half)[0] in (*CODECS, *SCHEMES, *OF_KIT)]
    return any(not _half_is_sound(half, adam=True) for half in halves)


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

    def told_of(self, codecs: Iterable[str]) -> list[str]:
        """A line for each reason for which some of these codecs do not meet it."""
        found: dict[str, list[str]] = {}
        for codec in codecs:
            found.setdefault(self.told(codec), []).append(codec)
        return [f"{', '.join(names)}: {'it' if len(names) == 1 else 'each'} {reason}" for reason, names in found.items()]

    def told(self, codec: str) -> str:
        """Why this codec, which does not meet it, does not, and what lets it in, as an end of a sentence."""
        if self.level == EXACT:
            return "changes gradients, which --quality exact does not allow"
        if self.level == SAFE:
            halves = [half for half in codec.split("/") if half != RELAY]
            lets_in = "--quality fast --optimizer sgd lets it in"
            if any(split_text(half)[1].get("momentum", "none") != "none" for half in halves):
                return f"applies momentum before compression, which suits SGD without a momentum of its own alone; {lets_in}"
            if any(half not in PUBLISHED_BYTES and _known_error(half) is None for half in halves):
                return f"has an error that is not known, and --quality safe takes what is known to be small; {lets_in}"
            return f"loses too much in a training's first steps (docs/quality.md); {lets_in}"
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
    found = _half(half)
    if error is None:
        error = typical_error(half)
    one = math.inf if error is None else error
    if found.name in CASTS or found.name in PUBLISHED_BYTES or half == UNCOMPRESSED:
        limit = SAFE_BIASED_ERROR
    else:
        from psgc.codecs.registry import parse_scheme  # which loads numba

        scheme = parse_scheme(half)
        limit = SAFE_ERROR if scheme.feedback else SAFE_UNBIASED_ERROR if scheme.unbiased else SAFE_BIASED_ERROR
    return not found.remembers and one * math.sqrt(encodings) <= limit


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
