"""psgc's codec texts as BytePS's compressors: the four that BytePS has, with the parameters that mean the same there."""

from __future__ import annotations

from typing import Final

from psgc.errors import CodecError
from psgc.pslite.byteps.compressor import Compressor, ErrorFeedback, InTurn
from psgc.pslite.byteps.registration import Registration

_NATURAL: Final = {"linear": "0", "natural": "1"}
_NORM: Final = {"max": "0", "l2": "1"}
_SWITCH: Final = {"0": "", "1": "1"}
_OTHER_SEED: Final = 0x9E3779B9  # any number does that leaves no seed as it is
# By codec, its parameters here: BytePS's name, and BytePS's values by psgc's ({}: as they are).
PARAMETERS: Final[dict[str, dict[str, tuple[str, dict[str, str]]]]] = {
    "onebit": {"scale": ("compressor_onebit_scaling", {"block": "true", "unit": "false"})},
    "topk": {"k": ("compressor_k", {})},
    "randomk": {"k": ("compressor_k", {})},
    "dithering": {"k": ("compressor_k", {}), "partition": ("dithering_partition", _NATURAL), "normalize": ("dithering_normalize", _NORM)},
}
DEFAULTS: Final = {
    "onebit": {"scale": "block", "ef": "1"}, "topk": {"k": "0.01", "ef": "1"}, "randomk": {"k": "0.01", "ef": "1"},
    "dithering": {"k": "7", "partition": "linear", "normalize": "max", "ef": "0"},
}  # fmt: skip


class Compression:
    """What ``text`` means over ps-lite. registration: what servers are told; None for ``none``. Error feedback stays on the worker: BytePS's servers end
    without a file of learning rates. Raises CodecError for a codec or a parameter that BytePS does not have."""

    def __init__(self, text: str, seed: int) -> None:
        push, _, pull = text.partition("/")
        name, _, rest = push.partition(":")
        self.text, self.registration, self._feedback = text, None, False
        if name == "none" and pull in ("", "none"):
            return
        if name not in PARAMETERS or pull not in ("", push):
            raise CodecError(
                f"codec {text}: over ps-lite (PSGC_WIRE=pslite) gradients travel by BytePS's codecs: none, {', '.join(PARAMETERS)}"
            )
        given = DEFAULTS[name] | dict(pair.partition("=")[::2] for pair in filter(None, rest.split(",")))
        self._feedback = bool(_SWITCH.get(given.pop("ef"), ""))
        settings = {"compressor_type": name}
        for parameter, value in given.items():
            theirs, values = PARAMETERS[name].get(parameter, ("", {}))
            if not theirs or (values and value not in values):
                raise CodecError(
                    f"codec {text}: BytePS has no {parameter}={value} for {name}; over ps-lite it takes {', '.join(PARAMETERS[name])} and ef"
                )
            settings[theirs] = values.get(value, value)
        if name in ("randomk", "dithering"):
            settings["seed"] = str(seed or 1)
        self.registration = Registration.of(settings)

    def registration_of(self, turn: int) -> Registration | None:
        """What the server of a part's key number ``turn`` is told. The second key of a random codec has a seed of its own: with the first one's, each
        two steps would draw the same numbers."""
        given = dict(self.registration.settings) if self.registration is not None else {}
        if not turn or "seed" not in given:
            return self.registration
        return Registration.of(given | {"seed": str(int(given["seed"]) ^ _OTHER_SEED or 1)})

    def compressor(self, numel: int, keys: int) -> Compressor | None:
        """The compressor of a part of ``numel`` elements and so many keys, which share one residual."""
        registrations = [found for turn in range(keys) if (found := self.registration_of(turn)) is not None]
        if not registrations:
            return None
        made = [registration.compressor(numel, on_worker=True) for registration in registrations]
        own = made[0] if keys == 1 else InTurn(made)
        return ErrorFeedback(own) if self._feedback else own
