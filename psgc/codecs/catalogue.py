"""Which codecs exist, what they save and what they lose: the table of ``psgc codecs``.

Figures come from real payloads of a 4 MiB part of fp32; those of a scheme come from a step of one worker. Sizes are those of Gaussian values; a scheme's
are the mean of push and pull. NMSE is |decode(encode(p)) - p|^2 / |p|^2 (Euclidean norms) of one encoding without feedback. Measuring them needs
every kernel, which takes minutes to compile on a new machine. So the figures of psgc's own codecs are kept in ``figures``, and a test measures them
again.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import numpy as np

from psgc.codecs.codec import F32, Bytes, Codec, Stream
from psgc.codecs.figures import FIGURES
from psgc.codecs.registry import kit_codecs, parse_codec, parse_scheme, plugin_codecs, registered_codecs, registered_schemes
from psgc.codecs.relay import RelayCodec, join_payloads
from psgc.codecs.scheme import BucketContext, PairScheme, Round, Scheme
from psgc.errors import CodecError

PART: Final = 1 << 20  # elements of a 4 MiB fp32 part
SHAPE: Final = (1024, PART // 1024)  # of the matrix that low rank is measured on
STREAM: Final = Stream(seed=1, step=1, rank=0, bucket=0)


class Figures(NamedTuple):
    """payload_bytes: of one part, for a scheme the mean of push and pull; nmse_...: rounded to three digits."""

    payload_bytes: float
    nmse_gaussian: float
    nmse_heavy: float


def catalogue(broken: list[str] | None = None) -> list[dict[str, Any]]:
    """One entry for each codec and scheme, at its default parameters. Those of other packages are measured now, and name their distribution. broken: gets a
    line for each of theirs that does not work and so has no entry; None: the first such raises its error."""
    own = [_entry(name, one, Figures(*FIGURES[name]) if name in FIGURES else _measured(one)) for name, one in _own().items()]
    return own + _others(broken)


def _others(broken: list[str] | None) -> list[dict[str, Any]]:
    """The entries of other packages' codecs; ``broken`` as of ``catalogue``."""
    found = []
    try:
        for name, package in plugin_codecs().items():
            try:
                one = _plugin(name)
                found.append(_entry(name, one, _measured(one)) | {"distribution": package})
            except Exception as error:  # whatever another package does
                if broken is None:
                    raise
                broken.append(
                    str(error) if isinstance(error, CodecError) else f"codec {name} of {package}: {type(error).__name__}: {error}"
                )
    except CodecError as error:  # of a name that is taken
        if broken is None:
            raise
        broken.append(str(error))
    return found


def measured_figures() -> dict[str, Figures]:
    """The correct contents of ``figures.FIGURES``, measured now, for psgc's own codecs and schemes. Runs all their kernels."""
    return {name: _measured(one) for name, one in _own().items()}


def _own() -> dict[str, Codec | Scheme]:
    schemes = {name: parse_scheme(name, BucketContext(shapes=(SHAPE,))) for name in registered_schemes()}
    return {name: parse_codec(name) for name in registered_codecs()} | schemes | {name: _plugin(name) for name in kit_codecs()}


def _plugin(name: str) -> Codec | Scheme:
    scheme = parse_scheme(name, BucketContext(shapes=(SHAPE,)))
    return scheme.pair.push if isinstance(scheme, PairScheme) else scheme


def _measured(what: Codec | Scheme) -> Figures:
    return _of_scheme(what) if isinstance(what, Scheme) else _of_codec(what)


def _of_scheme(scheme: Scheme) -> Figures:
    both_ways, of_gaussian = scheme_decoded(scheme, gaussian())
    return Figures(both_ways / 2, nmse(of_gaussian, gaussian()), nmse(scheme_decoded(scheme, heavy_tailed())[1], heavy_tailed()))


def _of_codec(codec: Codec) -> Figures:
    size, of_gaussian = codec_decoded(codec, gaussian())
    return Figures(size, nmse(of_gaussian, gaussian()), nmse(codec_decoded(codec, heavy_tailed())[1], heavy_tailed()))


def _entry(name: str, what: Codec | Scheme, figures: Figures) -> dict[str, Any]:
    return {
        "name": name,
        "canonical": what.canonical,
        "parameters": dict(what.defaults),
        "ratio_fp32": round(4 * PART / figures.payload_bytes, 3),
        "ratio_bf16": round(2 * PART / figures.payload_bytes, 3),
        "unbiased": what.unbiased,
        "feedback": what.feedback,
        "additive": what.additive,
        "nmse_gaussian": figures.nmse_gaussian,
        "nmse_heavy": figures.nmse_heavy,
        "advice": what.advice,
    }


@functools.cache
def gaussian() -> F32:
    """A part of standard normal values."""
    return np.random.default_rng(0).standard_normal(PART, np.float32)


@functools.cache
def heavy_tailed() -> F32:
    """A part of values of Student's t distribution with 3 degrees of freedom: finite variance, infinite kurtosis."""
    return np.random.default_rng(0).standard_t(3, PART).astype(np.float32)


def nmse(decoded: F32, values: F32) -> float:
    """Squared error over squared norm, to three digits."""
    wanted = values.astype(np.float64)
    return float(f"{np.sum((decoded - wanted) ** 2) / np.sum(wanted**2):.3g}")


def codec_decoded(codec: Codec, values: F32) -> tuple[int, F32]:
    """The length of a part's payload, and the elements that it decodes to."""
    out, decoded = np.empty(codec.payload_bound(values.size), np.uint8), np.empty_like(values)
    size = codec.encode(values, None, 1.0, STREAM, out).payload_bytes
    codec.decode(out[:size], values.size, 0, values.size, decoded)
    return size, decoded


def scheme_decoded(scheme: Scheme, values: F32) -> tuple[int, F32]:
    """The length of all payloads, both ways, of one step of a part in a job of one worker, and its result."""
    state, target, sent, both_ways = scheme.new_state(values.size), values.copy(), [], 0
    for index, round_ in enumerate(state.rounds):
        out = np.empty(round_.pair.push.payload_bound(round_.numel), np.uint8)
        sent.append(out[: state.encode(index, target, None, 1.0, STREAM, out).payload_bytes])
        answer = answered(round_, sent[-1:])
        both_ways += sent[-1].size + answer.size
        if index < len(state.rounds) - 1:
            state.take(index, answer)
        else:
            state.apply(answer, sent, target, None, 1.0)
    return both_ways, target


def answered(round_: Round, payloads: list[Bytes], divisor: int = 1) -> Bytes:
    """The server's answer to at most 8 payloads of one round, without a residual."""
    push, pull, numel = round_.pair.push, round_.pair.pull, round_.numel
    acc, out = np.empty(numel, push.acc_dtype), np.empty(pull.payload_bound(numel), np.uint8)
    if isinstance(pull, RelayCodec):
        return out[: join_payloads(payloads, out)]
    push.fold(payloads, numel, 0, numel, acc, True)
    return out[: pull.finish(acc, numel, 0, numel, divisor, None, None, 1.0, STREAM, out).payload_bytes]
