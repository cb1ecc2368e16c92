"""BytePS's options of compression (``{"byteps_compressor_type": "topk", "byteps_compressor_k": 0.01}``) as psgc's codec text.

BytePS spells them in three forms, all of which are read: as its code does on a parameter's attributes (``byteps_compressor_type``), as its documentation does
(``byteps_error_feedback_type``), and as ``compression_params`` of its trainers does (``compressor``, ``ef``). Owns these names and what each becomes.

| option, as in BytePS's code   | also spelt                          | values                           | becomes                                       |
|-------------------------------|-------------------------------------|----------------------------------|-----------------------------------------------|
| `byteps_compressor_type`      | `compressor`                        | onebit, topk, randomk, dithering | the codec of that name, for push and pull     |
| `byteps_compressor_k`         | `k`                                 | below 1 a share of a part, else a count; dithering: levels | `k`                 |
| `byteps_compressor_onebit_scaling` | `scaling`                      | a switch, off                    | onebit's `scale=block`, without it `scale=unit` |
| `byteps_ef_type`              | `byteps_error_feedback_type`, `ef`  | vanilla                          | `ef=1`, without it `ef=0`                     |
| `byteps_momentum_type`        | `momentum`                          | nesterov                         | `momentum=nesterov`                           |
| `byteps_momentum_mu`          | `mu`                                | a number                         | `mu`                                          |
| `byteps_dithering_partition`  | `partition`                         | linear or 0, natural or 1        | `partition`                                   |
| `byteps_dithering_normalize`  | `normalize`                         | max or 0, l2 or 1                | `normalize`                                   |
| `byteps_seed`                 | `byteps_compressor_seed`, `seed`    | a whole number above 0           | nothing: PSGC_SEED is the seed of all codecs  |
| `fp16`                        |                                     | a switch, off                    | without a compressor the codec `fp16`         |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psgc.codecs.common.texts import join_text
from psgc.diagnostics.spelling import did_you_mean
from psgc.errors import CodecError

COMPRESSORS: Final = ("onebit", "topk", "randomk", "dithering")
# every spelling -> the option
OPTIONS: Final = {
    "byteps_compressor_type": "compressor", "compressor": "compressor",
    "byteps_compressor_k": "k", "k": "k",
    "byteps_compressor_onebit_scaling": "scaling", "scaling": "scaling",
    "byteps_ef_type": "ef", "byteps_error_feedback_type": "ef", "ef": "ef",
    "byteps_momentum_type": "momentum", "momentum": "momentum",
    "byteps_momentum_mu": "mu", "mu": "mu",
    "byteps_dithering_partition": "partition", "partition": "partition",
    "byteps_dithering_normalize": "normalize", "normalize": "normalize",
    "byteps_seed": "seed", "byteps_compressor_seed": "seed", "seed": "seed",
    "fp16": "fp16",
}  # fmt: skip
_CHOICES: Final = {
    "ef": {"vanilla": "vanilla"},
    "momentum": {"nesterov": "nesterov"},
    "partition": {"0": "linear", "linear": "linear", "1": "natural", "natural": "natural"},
    "normalize": {"0": "max", "max": "max", "1": "l2", "l2": "l2"},
}
_SWITCH: Final = {"true": True, "1": True, "false": False, "0": False}


def options_text(options: Mapping[str, Any]) -> str:
    """Codec text for BytePS's options. Options that are None count as left out. Raises CodecError naming the option as it was spelt."""
    given: dict[str, tuple[str, str]] = {}  # option -> how it was spelt, and its value
    for spelt, value in options.items():
        option = OPTIONS.get(spelt)
        if option is None:
            raise CodecError(
                f"compression: BytePS has no option {spelt!r}{did_you_mean(str(spelt), OPTIONS)}; its options are {', '.join(OPTIONS)}"
            )
        if value is None:
            continue
        if option in given and given[option][1] != str(value):
            raise CodecError(f"compression: {given[option][0]} and {spelt} are the same option, with different values; leave one out")
        given[option] = spelt, str(value)
    if "compressor" not in given:
        beside = [spelt for option, (spelt, _) in given.items() if option not in ("fp16", "seed")]
        if beside:
            raise CodecError(
                f"compression: {beside[0]} is given, but byteps_compressor_type is not; set it to one of {', '.join(COMPRESSORS)}"
            )
        return "fp16" if _switch(given, "fp16") else "none"
    spelt, name = given["compressor"]
    if name not in COMPRESSORS:
        raise CodecError(f"compression: {spelt} is one of {', '.join(COMPRESSORS)}, not {name!r}{did_you_mean(name, COMPRESSORS)}")
    return join_text(name, _parameters(name, given))


def seed_among(options: object) -> tuple[str, Any] | None:
    """The seed among BytePS's options, as it is spelt, and its value; None where there is none."""
    given = options.items() if isinstance(options, Mapping) else ()
    return next(((spelt, value) for spelt, value in given if value is not None and OPTIONS.get(spelt) == "seed"), None)


def _parameters(name: str, given: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    found = {option: _choice(given, option) for option in _CHOICES if option in given}
    parameters = {"ef": "1" if "ef" in found else "0"}
    if name == "onebit":
        parameters["scale"] = "block" if _switch(given, "scaling") else "unit"
        if parameters == {"ef": "1", "scale": "unit"}:
            raise CodecError(
                "compression: onebit without scaling is refused with error feedback, whose residuals would grow without bound; set "
                "byteps_compressor_onebit_scaling to True"
            )
    elif "k" not in given:
        raise CodecError(f"compression: byteps_compressor_k is missing, which {name} needs")
    else:
        parameters["k"] = _k(*given["k"])
    if name == "dithering":
        parameters |= {option: found[option] for option in ("partition", "normalize") if option in found}
    if "momentum" in found:
        if "ef" not in found:
            raise CodecError("compression: byteps_momentum_type needs error feedback in psgc; set byteps_ef_type to vanilla")
        parameters |= {"momentum": "nesterov"} | ({"mu": given["mu"][1]} if "mu" in given else {})
    return parameters


def _k(spelt: str, text: str) -> str:
    """k as psgc writes it: a fraction below 1, or a count."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 2**31:
        raise CodecError(f"compression: {spelt} is a number above 0, not {text!r}")
    return text if value < 1 else str(int(value))


def _choice(given: Mapping[str, tuple[str, str]], option: str) -> str:
    spelt, text = given[option]
    choices = _CHOICES[option]
    if text.lower() not in choices:
        raise CodecError(f"compression: {spelt} is one of {', '.join(choices)}, not {text!r}")
    return choices[text.lower()]


def _switch(given: Mapping[str, tuple[str, str]], option: str) -> bool:
    spelt, text = given.get(option, ("", "0"))
    if text.lower() not in _SWITCH:
        raise CodecError(f"compression: {spelt} is True or False, not {text!r}")
    return _SWITCH[text.lower()]
