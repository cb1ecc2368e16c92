"""Other names of codecs: published methods whose payloads, server pass and random draws are those of another codec's parameters.

| text                       | is                                    | source                                                       |
|----------------------------|---------------------------------------|--------------------------------------------------------------|
| ``ternary``                | ``dithering:k=1``                     | Wen et al. 2017 (TernGrad), with the scale of a block of 256 |
| ``majority``               | ``onebit:ef=0,scale=unit``            | Bernstein et al. 2018 (signSGD with majority vote), alg. 2   |
| ``graddrop:drop=d``        | ``topk:k=1-d,select=sampled``         | Aji and Heafield 2017, section 3                             |

A majority vote needs no rule of its own on the server: workers vote -1 or +1, the server adds the votes and answers with the sign of their mean,
+1 for a tie, which is what answering sums of signs with signs is. What is printed, compared and sent is the codec's own text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from psgc.codecs.common.parameters import read_switch, with_defaults
from psgc.codecs.common.texts import join_text


@dataclass(frozen=True, slots=True)
class Alias:
    """defaults: the alias's parameters with their defaults; rewritten: gives the codec's text for these parameters."""

    name: str
    defaults: Mapping[str, str]
    rewritten: Callable[[Alias, Mapping[str, str]], str]

    def text(self, given: Mapping[str, str]) -> str:
        """The text of the codec that this alias means with these parameters. Raises CodecError naming alias and parameter."""
        return self.rewritten(self, with_defaults(self, given))


def _ternary(alias: Alias, given: Mapping[str, str]) -> str:
    return join_text("dithering", {"k": "1", "ef": str(int(read_switch(alias, "ef", given["ef"])))})


def _majority(alias: Alias, given: Mapping[str, str]) -> str:
    return "onebit:ef=0,scale=unit"


def _graddrop(alias: Alias, given: Mapping[str, str]) -> str:
    from psgc.codecs.sparsify.counts import read_share, write_k

    k = write_k(1 - read_share(alias, "drop", given["drop"]))
    return join_text("topk", {"select": "sampled", "k": k, "ef": given["ef"]})


ALIASES: Final = {
    alias.name: alias
    for alias in (
        Alias("ternary", {"ef": "0"}, _ternary),
        Alias("majority", {}, _majority),
        Alias("graddrop", {"drop": "0.99", "ef": "1"}, _graddrop),
    )
}
