"""What measured steps of a job say of a profile's costs: factors by which they differ, and the error that is left.

    "correction": {"factors": {"compute": 1.04, "codecs": 1.0, "server": 1.1, "messages": 1.3, "links": 0.9},
                   "error": 0.03, "date", "cluster": "where it was measured",
                   "steps": [{"name": "int8", "measured_ms", "predicted_ms", "corrected_ms"}]}

``psgc verify`` finds it and writes it into the profile, whose other fields stay as they were measured; whatever is planned by the profile is priced with it.
``links`` is a factor of rates, the others are factors of times. Owns the format, and what each factor scales. Does not know how factors are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from psgc.errors import UsageError
from psgc.plan.inputs.carriers import CarrierCosts
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.documents import is_number, shown

LEAST_FACTOR, MOST_FACTOR = 0.05, 20.0


@dataclass(frozen=True, slots=True)
class Factors:
    """compute: of forward and backward; codecs: of encoding, decoding and copies on workers; server: of a server's passes; messages: of carriers' fixed times;
    links: of the rates of links."""

    compute: float = 1.0
    codecs: float = 1.0
    server: float = 1.0
    messages: float = 1.0
    links: float = 1.0


NONE: Final = Factors()


@dataclass(frozen=True, slots=True)
class Correction:
    """factors: see there; error: the largest distance of a corrected prediction from its measured step, as a share of it; steps: what was measured."""

    factors: Factors
    error: float
    date: str = ""
    cluster: str = ""
    steps: tuple[Mapping[str, Any], ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        factors = {one.name: getattr(self.factors, one.name) for one in fields(Factors)}
        return {
            "factors": factors,
            "error": self.error,
            "date": self.date,
            "cluster": self.cluster,
            "steps": [dict(each) for each in self.steps],
        }


def read_correction(document: Any, source: str) -> Correction | None:
    """The correction in a profile's field; None if there is none. Raises UsageError, which names the field."""
    if document is None:
        return None
    place = f"{source}: correction"
    if not isinstance(document, Mapping) or not isinstance(document.get("factors"), Mapping):
        raise UsageError(f"{place}: expected an object with factors, got {shown(document)}")
    known = {one.name for one in fields(Factors)}
    for name, value in document["factors"].items():
        if name not in known:
            raise UsageError(f"{place}.factors: unknown factor {name!r}; expected some of {', '.join(sorted(known))}")
        if not is_number(value) or not LEAST_FACTOR <= value <= MOST_FACTOR:
            raise UsageError(f"{place}.factors.{name} is {shown(value)}, expected a number from {LEAST_FACTOR:g} to {MOST_FACTOR:g}")
    if not is_number(document.get("error")):
        raise UsageError(f"{place}.error is {shown(document.get('error'))}, expected a number of at least 0")
    steps = document.get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(each, Mapping) for each in steps):
        raise UsageError(f"{place}.steps: expected a list of objects")
    factors = Factors(**{name: float(value) for name, value in document["factors"].items()})
    return Correction(factors, float(document["error"]), str(document.get("date", "")), str(document.get("cluster", "")), tuple(steps))


def corrected_carrier(costs: CarrierCosts, factors: Factors) -> CarrierCosts:
    lone_us, each_us, peer_us = (us * factors.messages for us in (costs.lone_us, costs.each_us, costs.peer_us))
    return CarrierCosts(lone_us, each_us, peer_us, costs.gbps)


def corrected_links(cluster: Cluster, factors: Factors) -> Cluster:
    """The cluster with the rates that its links were measured to reach; what they are is not the cluster's to say, but the job's on it."""
    if factors.links == 1:
        return cluster

    def reached(link: Link) -> Link:
        return replace(link, gbps=link.gbps * factors.links)

    return replace(
        cluster,
        intra=reached(cluster.intra),
        inter=reached(cluster.inter),
        server=None if cluster.server is None else reached(cluster.server),
    )
