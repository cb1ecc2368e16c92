"""The default option of each bucket in a job without servers, in which workers aggregate among themselves. A plan may give others.

Nodes with several ranks sum within the node first, so that a gradient leaves a node once. If each node has one rank, or if there is only one node, all
ranks sum together. With a codec, each rank decodes the contributions to its share, sums them, and encodes the sum with the codec that servers would
answer with. So gradients are encoded as often as with servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psgc.codecs import Scheme
from psgc.codecs.none import NoneCodec
from psgc.codecs.registry import SCRIPT_CODEC, parse_scheme
from psgc.codecs.relay import RelayScheme
from psgc.codecs.scheme import PairScheme

Option = tuple[str, ...]
# Each rank sums its share in the order of the ranks, 16-bit floats in float32: all_reduce would add in the array's own type.
SUM: Final[Option] = ("flat.reduce_scatter", "flat.all_gather")
SUM_BY_NODE: Final[Option] = ("intra.reduce_scatter", "inter.reduce_scatter", "inter.all_gather", "intra.all_gather")
ENCODED: Final[Option] = ("comp@cpu", "flat.all_to_all.c", "decomp@cpu", "comp@cpu", "flat.all_gather.c", "decomp@cpu")
ENCODED_BY_NODE: Final[Option] = (
    "intra.reduce_scatter", "comp@cpu", "inter.all_to_all.c", "decomp@cpu", "comp@cpu", "inter.all_gather.c", "decomp@cpu", "intra.all_gather",
)  # fmt: skip
GATHERED: Final[Option] = ("comp@cpu", "flat.all_gather.c", "decomp@cpu")  # relay without servers; plans may have it
BROADCAST: Final[Option] = ("flat.broadcast",)  # of the root's bytes; plans do not have it
# Other dtypes are summed over all ranks in one step: a node's sum could leave the range of integers or float16 although the mean of all ranks does not.
_SUMMED_TWICE: Final = ("float32", "bfloat16", "float64")


def needs_servers(scheme: Scheme) -> bool:
    """Whether the scheme works only with servers, because it takes several rounds or has its own aggregation rule."""
    return type(scheme) is not PairScheme


def refusal(scheme: Scheme) -> str:
    """The error message for a scheme that needs servers, in a job that has none."""
    push = scheme.canonical.removesuffix("/relay")
    if isinstance(scheme, RelayScheme) and not push.startswith(SCRIPT_CODEC) and not needs_servers(parse_scheme(push)):
        return (
            f"codec {scheme.canonical} has servers forward payloads, and this job has none; ranks do the same among themselves by a plan whose buckets have "
            f"the codec {push} and the option {' '.join(GATHERED)}, or start one or more servers (--servers, DMLC_NUM_SERVER)"
        )
    return (
        f"codec {scheme.canonical} needs servers, and this job has none; start one or more (--servers, DMLC_NUM_SERVER), or take a codec that ranks "
        f"can sum among themselves, such as int8, onebit or topk:k=0.01"
    )


def default_option(scheme: Scheme, dtype: str, broadcast: bool, node_sizes: Sequence[int]) -> Option:
    """The default option of a bucket with this dtype and scheme. node_sizes: the number of ranks of each node."""
    if broadcast:
        return BROADCAST
    by_node = len(node_sizes) > 1 and max(node_sizes) > 1
    if _is_plain(scheme):
        return SUM_BY_NODE if by_node and dtype in _SUMMED_TWICE else SUM
    return ENCODED_BY_NODE if by_node else ENCODED


def _is_plain(scheme: Scheme) -> bool:
    return isinstance(scheme, PairScheme) and isinstance(scheme.pair.push, NoneCodec) and isinstance(scheme.pair.pull, NoneCodec)
