"""Which of four regimes a job on a link belongs to: no compression, bf16, compression every step, or local steps with rare exchanges.

The ladder is climbed from what gives up least: a rung is taken if it saves more of an iteration than it may be wrong by, and enough for
what it gives up. Owns the ladder and its words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from psgc.plan.inputs.cluster import Cluster
from psgc.plan.inputs.estimates import estimates_notes, with_estimates
from psgc.plan.inputs.profile import Profile
from psgc.plan.report.wording import ms
from psgc.plan.whatif.candidates import BF16, CORNERS, NOMINAL, Candidate, candidates, considered
from psgc.plan.whatif.regimes import all_reduce_us, exposure, needed_ratio

# The share of an iteration that a rung must save: bf16 gives up next to nothing; a codec costs work to tune and watch; local steps are
# another optimizer, with learning rates of its own.
LEAST_GAIN: Final = {"none": 0.0, BF16: 0.01, "compress": 0.05, "infrequent": 0.2}

LEAST_WORTH_SAYING: Final = 0.005


@dataclass(frozen=True, slots=True)
class Gain:
    """What one candidate saves of another's iteration. margin: by how much that moves in the corners."""

    gain: float
    margin: float

    def __str__(self) -> str:
        gain = f"{self.gain:.1%}" if self.gain > 0.9 else f"{self.gain:.0%}"
        return f"{gain} +-{self.margin:.0%}" if self.margin >= 0.005 else gain


def gain_over(candidate: Candidate, other: Candidate) -> Gain:
    """What the candidate saves of the other's iteration; both in the same corner."""
    gain = 1 - candidate.iteration_us(NOMINAL) / other.iteration_us(NOMINAL)
    corners = (1 - candidate.iteration_us(corner) / other.iteration_us(corner) for corner in CORNERS)
    return Gain(gain, max(abs(corner - gain) for corner in corners))


def climb(rungs: Sequence[Candidate]) -> Candidate:
    """The highest rung worth taking: over the one taken so far for more than its margin, over those of lower kinds for what it gives up,
    lest a tie with the one just below make the next look good. rungs: in the order of what they give up."""
    chosen = rungs[0]
    for number, rung in enumerate(rungs[1:], 1):
        lower = [below for below in rungs[:number] if below.kind != rung.kind or below is chosen]
        saved = gain_over(rung, chosen)
        if saved.gain > saved.margin and all(gain_over(rung, below).gain > LEAST_GAIN[rung.kind] for below in lower):
            chosen = rung
    return chosen


def advise(
    profile: Profile, cluster: Cluster, *, memory_gbps: float | None = None, adam: bool = True, codecs: Sequence[str] = ()
) -> dict[str, Any]:  # fmt: skip
    """The advice. memory_gbps: of the GPU, to estimate codec times by that the profile has not; adam: whether the optimizer is Adam-like;
    codecs: those to look at, if not the usual ones."""
    asked = tuple(codecs) or considered(profile)
    profile, estimated = with_estimates(profile, memory_gbps, asked)
    known = [name for name in asked if codecs or name in profile.codecs]
    found = candidates(profile, cluster, known, estimated, adam=adam)
    none, bf16, local = found[0], found[1], found[-1]
    carried = climb([one for one in found if one.sound and one is not local])
    chosen = climb([carried, local])
    overall, over_bf16 = gain_over(chosen, none), gain_over(chosen, bf16)
    return {
        "verdict": chosen.kind, "choice": chosen.name, "gain": overall.gain, "margin": overall.margin, "gain_over_bf16": over_bf16.gain,
        "margin_over_bf16": over_bf16.margin, "best_that_psgc_carries": carried.name,
        "why": _why(profile, cluster, found, carried, chosen), "notes": _notes(profile, cluster, found, asked, known, estimated, memory_gbps, adam=adam),
        "needed_ratio_over_bf16": _finite(needed_ratio(profile, cluster)), "candidates": [_shown(one, none, bf16) for one in found],
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(one: Candidate, none: Candidate, bf16: Candidate) -> dict[str, Any]:
    overall, over_bf16 = gain_over(one, none), gain_over(one, bf16)
    return {
        "name": one.name, "kind": one.kind, "iteration_ms": one.iteration_us(NOMINAL) / 1e3, "gain": overall.gain, "margin": overall.margin,
        "gain_over_bf16": over_bf16.gain, "margin_over_bf16": over_bf16.margin, "ratio_fp32": 4 / one.bytes_per_element,
        "ratio_bf16": 2 / one.bytes_per_element, "times": one.times, "sound": one.sound, "carried": one.kind != "infrequent",
        "compressed_share": one.compressed_share, "residual_bytes": one.residual_bytes,
    }  # fmt: skip


def _why(profile: Profile, cluster: Cluster, found: Sequence[Candidate], carried: Candidate, chosen: Candidate) -> str:
    return f"{_hides(profile, cluster)}. {_worth(found, carried, chosen)}."


def _hides(profile: Profile, cluster: Cluster) -> str:
    if cluster.nodes == 1:
        return "There is one node, and nothing goes between nodes"
    reduce, backward = all_reduce_us(profile, cluster), profile.backward_us
    if not backward:
        return f"All gradients are ready at once: a bf16 all-reduce takes {ms(reduce)} ms, and there is no backward to hide it behind"
    ratio, times = needed_ratio(profile, cluster), exposure(profile, cluster)
    text = f"A bf16 all-reduce takes {_number(times)} times as long as backward ({ms(reduce)} ms against {ms(backward)} ms)"
    if ratio == 1:
        return f"{text} and hides behind it"
    return f"{text}: {f'{_number(ratio)} times fewer bytes would hide' if math.isfinite(ratio) else 'no ratio would hide its latency'}"


def _number(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def _worth(found: Sequence[Candidate], carried: Candidate, chosen: Candidate) -> str:
    none, bf16, local = found[0], found[1], found[-1]
    if chosen.kind == "infrequent":
        steps, best = chosen.name.partition("-")[2], f"{carried.name} is the best of what goes every step"
        if carried is not bf16:
            best = f"{carried.name}, the best of what goes every step, saves {gain_over(carried, bf16)}"
        saved = f"Local steps, exchanged every {steps}, save {gain_over(chosen, bf16)} over bf16, where {best}"
        return f"{saved}. psgc carries no local steps yet; of what it carries take {carried.name}"
    rare = gain_over(local, chosen)
    further = _further(found, chosen)
    if rare.gain > LEAST_GAIN["compress"]:
        further += f"; local steps, which psgc does not carry yet, would save {rare} more"
    if chosen.kind == "none":
        return f"Leave gradients as they are{further}"
    if chosen.kind == BF16:
        return f"bf16 saves {gain_over(chosen, none)} over fp32{further}"
    return f"{chosen.name} saves {gain_over(chosen, bf16)} over bf16, and {gain_over(chosen, none)} over fp32{further}"


def _further(found: Sequence[Candidate], chosen: Candidate) -> str:
    """What the fastest of the others that go every step would add."""
    others = [one for one in found[:-1] if one.sound and one is not chosen]
    best = min(others, key=lambda one: one.iteration_us(NOMINAL))
    more = gain_over(best, chosen)
    if more.gain < LEAST_WORTH_SAYING:
        return ""
    tie = "a tie" if more.gain <= more.margin else "less than it must to be worth it"
    return f"; {best.name} would save {more} more, {tie}"


def _notes(
    profile: Profile, cluster: Cluster, found: Sequence[Candidate], asked: Sequence[str], known: Sequence[str], estimated: frozenset[str],
    memory_gbps: float | None, *, adam: bool,
) -> list[str]:  # fmt: skip
    """What the answer rests on."""
    notes = [f"ready times: {profile.source or 'as in the profile'}", f"links: {cluster.source}"]
    if profile.forward_us is None:
        notes.append("the profile has no forward time: gains are of backward and synchronization")
    notes += [f"{note}; margins allow for half as much again" for note in estimates_notes(estimated, memory_gbps)]
    missing = [name for name in asked if name not in known]
    if missing:
        notes.append(
            f"left out: {', '.join(missing)}, without times in the profile; measure them with psgc profile, or name a GPU to estimate them"
        )
    keeping = [one for one in found if one.residual_bytes]
    if keeping:
        most = max(one.residual_bytes for one in keeping)
        notes.append(
            f"memory: {', '.join(one.name for one in keeping)} keep what was not sent yet, in fp32: up to {most / 1e9:,.3g} GB in each worker, "
            f"and as much again over the servers where they encode the sum"
        )
    if adam:
        notes.append(
            "for an Adam-like optimizer: onebit, topk and their like cost quality there and are no part of the verdict; --optimizer sgd lets them in"
        )
    notes.append("bf16: gradients that are bf16 when they are ready, or cast at no cost")
    notes.append("local steps change the optimizer: fewer exchanges, other learning rates; their quality is not judged here")
    return notes
