"""Codecs and schemes by their text forms: the only file that knows all of them.

| text                     | gives                                                                                      |
|--------------------------|--------------------------------------------------------------------------------------------|
| ``name:key=value,...``   | ``parse_codec``: a codec of psgc's, or of another package that is installed                 |
| ``push/pull``            | ``parse_pair``: two of them; one name means both sides                                       |
| any of these, ``push/relay``, ``shared``, ``powersgd`` | ``parse_scheme``: how a bucket is synchronised, in one round or several |

A codec's module is imported when it is first named, so that a process loads only what it runs.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Final, cast

from psgc.codecs.aliases import ALIASES
from psgc.codecs.codec import Codec, CodecPair
from psgc.codecs.common.script_functions import LEAST_PER_ELEMENT, Functions, known_functions
from psgc.codecs.common.sources import digest_suffix
from psgc.codecs.common.texts import join_text, split_text
from psgc.codecs.plugins import load_plugin, plugins
from psgc.codecs.scheme import BucketContext, PairScheme, Scheme
from psgc.codecs.table import CODECS, OF_FRONT_ENDS, OF_KIT, SCHEMES
from psgc.diagnostics.spelling import did_you_mean
from psgc.errors import CodecError

_ANY: Final = BucketContext()
SCRIPT_CODEC: Final = "functions"  # script_codec's name


def registered_codecs() -> tuple[str, ...]:
    """Names of psgc's own codecs, as `table` has them; without aliases."""
    return tuple(CODECS)


def registered_aliases() -> tuple[str, ...]:
    """Other names of psgc's own codecs."""
    return tuple(ALIASES)


def registered_schemes() -> tuple[str, ...]:
    """Names of the schemes of several rounds."""
    return tuple(SCHEMES)


def kit_codecs() -> tuple[str, ...]:
    """Names of psgc's codecs and schemes that are written with the kit."""
    return tuple(OF_KIT)


def plugin_codecs() -> dict[str, str]:
    """Names of other packages' codecs and schemes, with the distribution that each is from. Raises CodecError for a name that is taken."""
    return plugins(_own_names())


def registered_functions() -> tuple[str, ...]:
    """Names that functions have been given in this process."""
    return tuple(known_functions())


def register_functions(name: str, functions: Functions) -> None:
    """Make ``name/relay`` a codec in this process. Raises CodecError for a name or a bound that cannot be."""
    if not name.replace("_", "").isalnum() or not name.isascii():
        raise CodecError(f"codec {name!r}: a name is made of letters, digits and underscores")
    if name in (*_own_names(), *registered_functions()):
        raise CodecError(f"codec {name}: there is one of this name already; choose another")
    if not (LEAST_PER_ELEMENT <= functions.bytes_per_element < math.inf and functions.extra_bytes >= 0):
        raise CodecError(
            f"codec {name}: payloads of up to {functions.bytes_per_element} bytes an element and {functions.extra_bytes} more; "
            f"at least {LEAST_PER_ELEMENT} and 0 expected"
        )
    known_functions()[name] = functions


def parse_codec(text: str, dtype: str = "float32") -> Codec:
    """Build a codec from ``name`` or ``name:key=value,...``. ``name@digest`` asks for exactly the code that has this digest. Raises
    CodecError naming codec and parameter."""
    name, parameters = split_text(text)
    if name in ALIASES:
        name, parameters = split_text(ALIASES[name].text(parameters))
    name, at, digest = name.partition("@")
    found = _codec_class(name)
    _check_digest(name, at + digest, digest_suffix(found, Codec))
    return found.from_parameters(parameters, dtype)


def parse_pair(text: str, dtype: str = "float32") -> CodecPair:
    """Build the pair from ``push/pull``, or from one codec for both sides. Raises CodecError, also for two codecs that cannot be combined."""
    push, slash, pull = text.partition("/")
    first = parse_codec(push, dtype)
    return CodecPair(first, (parse_codec(pull, dtype) if slash else first).answering(first))


def parse_scheme(text: str, context: BucketContext = _ANY) -> Scheme:
    """Build the scheme that ``text`` names. Raises CodecError naming codec and parameter."""
    push, slash, pull = text.strip().partition("/")
    name, parameters = split_text(push)
    scheme = _scheme_class(name)
    if scheme is not None:
        if pull:
            raise CodecError(f"codec {name} answers by a rule of its own: write {push!r}, not {text!r}")
        return scheme.from_parameters(parameters, context)
    from psgc.codecs.momentum import MomentumScheme, read_momentum, split_momentum

    own, remembered = split_momentum(parameters)
    push = join_text(name, own)
    momentum = read_momentum(name, remembered)
    inner = _one_round(f"{push}{slash}{pull}", context)
    return MomentumScheme(inner, momentum, context) if momentum.parameters else inner


def _one_round(text: str, context: BucketContext) -> Scheme:
    push, _, pull = text.partition("/")
    if pull == "relay":
        from psgc.codecs.relay import RelayScheme

        codec = _relayed(push, context.dtype)
        _check_bucket([codec], context)
        return RelayScheme(codec, context)
    pair = parse_pair(text, context.dtype)
    _check_bucket([pair.push, pair.pull], context)
    return PairScheme(pair)


def _check_bucket(codecs: Sequence[Codec], context: BucketContext) -> None:
    """Raise CodecError, naming the bucket's first tensor by its shape, if a codec cannot carry the bucket."""
    if not context.shapes:  # not known
        return
    for codec in codecs:
        try:
            codec.check_bucket(sum(map(math.prod, context.shapes)))
        except CodecError as error:
            raise CodecError(f"{error} (tensor of shape {list(context.shapes[0])}, of {len(context.shapes)} in the bucket)") from None


def _relayed(text: str, dtype: str) -> Codec:
    """The codec in front of ``/relay``: functions, or any other."""
    from psgc.codecs.script_codec import ScriptCodec

    name, parameters = split_text(text)
    if name == SCRIPT_CODEC:
        return ScriptCodec.from_parameters(parameters, dtype)
    functions = known_functions().get(name)
    if functions is None:
        return parse_codec(text, dtype)
    if parameters:
        raise CodecError(f"codec {name} is made of functions and takes no parameters, got {', '.join(parameters)}")
    return ScriptCodec(dtype, functions_name=name, bound=(functions.bytes_per_element, functions.extra_bytes), ef=functions.feedback)


def _own_names() -> tuple[str, ...]:
    return (*CODECS, *ALIASES, *SCHEMES, *OF_KIT, *OF_FRONT_ENDS, SCRIPT_CODEC, "relay")


def _check_digest(name: str, wanted: str, here: str) -> None:
    """Raise CodecError if the text asks for code with another digest than that of the code installed here."""
    if wanted and wanted != here:
        raise CodecError(
            f"codec {name}: another member of the job has code of digest {wanted[1:]}, here is {here[1:] or 'psgc'}; install one version of its "
            f"package with every worker, every server and the scheduler"
        )


def _codec_class(name: str) -> type[Codec]:
    target = (CODECS | OF_KIT | OF_FRONT_ENDS).get(name)
    found = _imported(target) if target is not None else _plugin_class(name)
    if issubclass(found, Scheme):
        raise CodecError(f"codec {name} answers by a rule of its own: write {name!r} by itself, not as one of a pair")
    return cast("type[Codec]", found)


def _scheme_class(text: str) -> type[Scheme] | None:
    """The class of the scheme of this name, or ``name@digest``; None if it is a codec's name. Raises CodecError for an unknown name."""
    name, at, digest = text.partition("@")
    if name in SCHEMES:
        return cast("type[Scheme]", _imported(SCHEMES[name]))
    if name in OF_KIT:
        made = _imported(OF_KIT[name])
        return made if issubclass(made, Scheme) else None
    if name in (*_own_names(), *registered_functions()):
        return None
    found = _plugin_class(name)
    if not issubclass(found, Scheme):
        return None
    _check_digest(name, at + digest, digest_suffix(found, Scheme))
    return found


def _imported(target: str) -> type:
    """The class at ``module:class``."""
    module, _, attribute = target.partition(":")
    return cast("type", getattr(importlib.import_module(module), attribute))


@functools.cache
def _plugin_class(name: str) -> type[Codec] | type[Scheme]:
    """The class of another package's codec or scheme of this name. Raises CodecError if no package has one, or if it does not work."""
    if name == SCRIPT_CODEC or name in registered_functions():
        raise CodecError(f"codec {name}: its functions exist in the trainer only, so servers cannot decode it; write '{name}/relay'")
    if name in registered_schemes():
        raise CodecError(f"codec {name} takes several rounds: write {name!r} by itself, not as one of a pair")
    if name == "relay":
        raise CodecError("codec relay is an answer alone: write it behind the codec whose payloads are forwarded, as in 'onebit/relay'")
    packages = plugin_codecs()
    if name not in packages:
        functions = [f"{each}/relay" for each in registered_functions()]
        known = (*registered_codecs(), *registered_aliases(), *registered_schemes(), *OF_KIT, *packages, *functions)
        raise CodecError(
            f"unknown codec {name!r}; choose one of {', '.join(known)}; one of another package has to be installed with every worker, every server "
            f"and the scheduler{did_you_mean(name.lower(), (*known, 'relay'))}"
        )
    return load_plugin(name, packages[name])
