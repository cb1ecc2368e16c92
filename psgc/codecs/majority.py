"""The `majority` codec: workers vote -1 or +1 on every element, and the server answers with the outcome of the vote.

The payload is that of `signs`, both ways. A worker votes the sign of its gradient, +1 for a zero. The server adds the votes in float32, exactly
for up to 2**24 workers, and takes the sign of their mean, +1 for a tie. What workers decode is -1 or +1, whatever the gradients' size, and
whether a mean or a sum was asked for: how far a step goes is up to the learning rate alone. In a pair with another codec, ``majority/int8``,
the server answers with the mean of the votes.

Owns no bytes and no kernel. There is no feedback, and without it signs need not converge, not even on a convex function of two
variables (Karimireddy et al. 2019, section 3): for comparison more than for use.
Source: Bernstein et al. 2018 (signSGD with majority vote), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from psgc.codecs.codec import Codec
from psgc.codecs.common.parameters import with_defaults
from psgc.codecs.common.signs import SignsCodec


class MajorityCodec(SignsCodec):
    """1 bit an element, both ways."""

    name = "majority"
    codec_id = 15
    advice = "comparisons with signSGD: a bit each way whatever the number of workers, but no feedback, and it can stand still"
    defaults: ClassVar[dict[str, str]] = {}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        with_defaults(cls, parameters)
        return cls(dtype)

    @property
    def parameters(self) -> dict[str, str]:
        return {}
