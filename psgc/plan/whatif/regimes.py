"""When a 16-bit all-reduce hides behind backward: a rule of thumb, and a refinement for a profile and a cluster.

A parameter costs 4 FLOPs per token in backward (two products of 2) and 2 bytes on the wire, each of which passes a node's link twice in an
all-reduce among many nodes. The number of parameters cancels:

    tokens * 4 / (TFLOP/s * 1e12)  >=  2 * 2 bytes * 8 / (Gbit/s * 1e9)      or      tokens * Gbit/s  >=  8000 * TFLOP/s

Tokens are per GPU and step, the link is a node's, and TFLOP/s are what a GPU achieves; at 400 the product must be 3.2 million. The rule does not depend
on the number of a node's GPUs: they share its link, but sum within the node first, so they do not add to its load. Owns this arithmetic. ``needed_ratio``
refines it for a profile and a cluster: nodes may be few, messages take time, nothing hides the last bucket, and some tensors (embeddings) need no
computing. Source: ours, from the cost of a ring (Thakur et al. 2005) and 6 FLOPs per parameter and token (Kaplan et al. 2020, section 2.1).
"""

from __future__ import annotations

import math
from typing import Final

from psgc.plan.inputs.cluster import Cluster
from psgc.plan.inputs.profile import Profile

BACKWARD_FLOPS: Final = 4.0  # a parameter and token
BF16_BYTES: Final = 2.0
LAST_SHARE: Final = 0.05  # share of backward that the last bucket's bytes, which nothing hides, may take
BUCKETS: Final = 21  # the best number without latency, because each bucket then takes LAST_SHARE of backward
MOST_BUCKETS: Final = 1000


def hiding_product(tflops: float) -> float:
    """The least product of a GPU's tokens per step and a node's Gbit/s at which a bf16 all-reduce hides behind backward."""
    bits = 2 * BF16_BYTES * 8
    return bits / 1e9 * tflops * 1e12 / BACKWARD_FLOPS


def rule_ratio(tokens: float, gbps: float, tflops: float) -> float:
    """The compression ratio over bf16 at which communication hides, by the rule of thumb; at least 1."""
    return max(1.0, hiding_product(tflops) / (tokens * gbps))


def needed_ratio(profile: Profile, cluster: Cluster, bytes_per_element: float = BF16_BYTES) -> float:
    """The compression ratio at which communication hides behind this profile's backward on this cluster, with the best number of equal buckets.

    All buckets but the last, each of which takes latency + bytes / ratio, must take at most backward's time, and the last one's bytes LAST_SHARE of it.
    At least 1; infinity if one bucket's latency is as long as backward, because then even two buckets cannot hide.
    """
    nodes = cluster.nodes
    if nodes == 1:
        return 1.0
    latency = 2 * (nodes - 1) * cluster.inter.latency_us
    sending = 2 * (nodes - 1) / nodes * bytes_per_element * profile.numel * cluster.inter.us_per_byte
    return max(1.0, min(_ratio_in(buckets, sending, latency, profile.backward_us) for buckets in range(2, MOST_BUCKETS)))


def _ratio_in(buckets: int, sending: float, latency: float, backward: float) -> float:
    """The compression ratio that this number of buckets needs."""
    budget = min(backward / (buckets - 1) - latency, LAST_SHARE * backward)
    return sending / buckets / budget if budget > 0 else math.inf


def all_reduce_us(profile: Profile, cluster: Cluster, bytes_per_element: float = BF16_BYTES) -> float:
    """The time of an all-reduce of the whole gradient, in one piece, on the links between nodes."""
    nodes, link = cluster.nodes, cluster.inter
    return 2 * (nodes - 1) * (bytes_per_element * profile.numel / nodes * link.us_per_byte + link.latency_us)


def exposure(profile: Profile, cluster: Cluster, bytes_per_element: float = BF16_BYTES) -> float:
    """The time of that all-reduce divided by backward's."""
    return all_reduce_us(profile, cluster, bytes_per_element) / profile.backward_us if profile.backward_us else math.inf
