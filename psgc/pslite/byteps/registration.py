"""BytePS's registration of a compressor: names and values as text on the wire, and the compressor that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from psgc.diagnostics.spelling import did_you_mean
from psgc.errors import CodecError, RemoteProtocolError
from psgc.pslite.byteps.commands import aligned_bytes
from psgc.pslite.byteps.compressor import Compressor, ErrorFeedback, NesterovMomentum, count_of

MAX_BYTES: Final = 4096
PREFIX: Final = "byteps_"  # which BytePS's plugins take off
TYPES: Final = ("onebit", "topk", "randomk", "dithering")
NAMES: Final = (
    "compressor_type", "compressor_k", "compressor_onebit_scaling", "seed", "dithering_partition", "dithering_normalize", "ef_type", "momentum_type",
    "momentum_mu",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Registration:
    """settings: names without BytePS's prefix, and values."""

    settings: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Registration:
        """Raises CodecError for names and values that BytePS does not have."""
        bare = {name.removeprefix(PREFIX): str(value) for name, value in settings.items()}
        for name, value in bare.items():
            if name not in NAMES:
                raise CodecError(
                    f"BytePS's compressors have no setting {name!r}{did_you_mean(name, NAMES) or '; expected ' + ', '.join(NAMES)}"
                )
            if not value or not value.isascii() or any(sign.isspace() for sign in value):
                raise CodecError(f"{name}={value!r}: expected text without spaces")
        made = cls(tuple(sorted(bare.items())))
        made.compressor(1 << 20, on_worker=True)  # raises for values that are wrong whatever the part
        return made

    @classmethod
    def parse(cls, text: bytes) -> Registration:
        """The registration in bytes from the wire. Raises RemoteProtocolError for bytes that no worker would send."""
        try:
            count, *words = text.decode("ascii").split()
            if len(text) > MAX_BYTES or int(count) * 2 != len(words) or len(set(words[::2])) < int(count):
                raise ValueError(f"{count} settings announced, {len(words)} words")
            return cls.of(dict(zip(words[::2], words[1::2], strict=True)))
        except (ValueError, CodecError) as error:
            raise RemoteProtocolError(f"a compressor is registered as {text[:100]!r}: {error}") from None

    def text(self) -> bytes:
        return " ".join([str(len(self.settings)), *(word for pair in self.settings for word in pair)]).encode()

    def compressor(self, numel: int, on_worker: bool = False) -> Compressor:
        """The compressor for one part of float32. Servers leave momentum to workers, as in BytePS. Raises CodecError."""
        given = dict(self.settings)
        kind = given.get("compressor_type", "")
        seed = _whole(given, "seed", 0, 1, (1 << 32) - 1)
        made: Compressor
        if kind == "onebit":
            from psgc.pslite.byteps.onebit import Onebit

            made = Onebit(numel, _choice(given, "compressor_onebit_scaling", ("false", "true")))
        elif kind in ("topk", "randomk"):
            k = count_of(given.get("compressor_k", ""), aligned_bytes(4 * numel, "float32"), numel)
            from psgc.pslite.byteps.randomk import RandomK
            from psgc.pslite.byteps.topk import TopK

            made = TopK(numel, k) if kind == "topk" else RandomK(numel, k, seed)
        elif kind == "dithering":
            from psgc.pslite.byteps.dithering import Dithering

            natural, l2 = (_choice(given, f"dithering_{name}", ("0", "1")) for name in ("partition", "normalize"))
            made = Dithering(numel, _whole(given, "compressor_k", None, 1, (1 << 31) - 1), natural, l2, seed)
        else:
            raise CodecError(f"compressor_type={kind!r}: expected one of {', '.join(TYPES)}")
        if _choice(given, "ef_type", ("", "vanilla")):
            made = ErrorFeedback(made)
        if _choice(given, "momentum_type", ("", "nesterov")) and on_worker:
            made = NesterovMomentum(made, _number(given, "momentum_mu"))
        return made


def _choice(given: Mapping[str, str], name: str, choices: tuple[str, str]) -> bool:
    """Whether it is the second one; the first is the default."""
    value = given.get(name, choices[0])
    if value not in choices:
        raise CodecError(f"{name}={value!r}: expected {' or '.join(filter(None, choices))}")
    return value == choices[1]


def _whole(given: Mapping[str, str], name: str, default: int | None, least: int, most: int) -> int:
    if name not in given and default is not None:
        return default
    text = given.get(name, "")
    if not text.isdigit() or not least <= int(text) <= most:
        raise CodecError(f"{name}={text!r}: expected a whole number from {least} to {most}")
    return int(text)


def _number(given: Mapping[str, str], name: str) -> float:
    try:
        return float(given.get(name, ""))
    except ValueError:
        raise CodecError(f"{name}={given.get(name, '')!r}: expected a number") from None
