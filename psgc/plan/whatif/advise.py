"""Which of three ways of exchanging gradients pays on a link: no compression, bf16, or a codec in every step. Beside them, what optimizers that exchange
rarely would take.

The candidates form a ladder, the one that gives up least first. A rung is taken if it saves more of an iteration than its margin of error, and enough
to be worth what it gives up. The advice is the highest such rung that this version runs. What only a later version could run is mentioned, but never
advised. Local steps, the ladder's last rung, run, but are not advised either: nobody can tell their quality ahead. Owns the ladder and its words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from psgc.plan.inputs.cluster import Cluster
from psgc.plan.inputs.estimates import Measured, Timed, with_codec_times
from psgc.plan.inputs.profile import Profile
from psgc.plan.model.gains import share_saved
from psgc.plan.model.level import EXACT
from psgc.plan.model.quality import SAFELY, Standard
from psgc.plan.report.running import is_whole
from psgc.plan.report.wording import gigabytes, ms
from psgc.plan.whatif.candidates import BF16, CORNERS, NOMINAL, Candidate, considered, ladder
from psgc.plan.whatif.rarely import rarely, told_of_intervals, told_of_losses
from psgc.plan.whatif.regimes import all_reduce_us, exposure, needed_ratio

# The share of an iteration that a rung must save. bf16 gives up next to nothing; a codec must be tuned and watched; local steps are another
# optimizer, with its own learning rates.
LEAST_GAIN: Final = {"none": 0.0, BF16: 0.01, "compress": 0.05, "infrequent": 0.2}

LEAST_WORTH_SAYING: Final = 0.005


@dataclass(frozen=True, slots=True)
class Gain:
    """The share of another candidate's iteration that a candidate saves. margin: how much it differs in the corners."""

    gain: float
    margin: float

    def __str__(self) -> str:
        gain = f"{self.gain:.1%}" if self.gain > 0.9 else f"{self.gain:.0%}"
        return f"{gain} +-{self.margin:.0%}" if self.margin >= 0.005 else gain


def gain_over(candidate: Candidate, other: Candidate) -> Gain:
    """The share of the other candidate's iteration that this one saves. The margin compares both in the same corner."""
    gain = share_saved(candidate.iteration_us(NOMINAL), other.iteration_us(NOMINAL))
    corners = (share_saved(candidate.iteration_us(corner), other.iteration_us(corner)) for corner in CORNERS)
    return Gain(gain, max(abs(corner - gain) for corner in corners))


def climb(rungs: Sequence[Candidate]) -> Candidate:
    """The highest rung worth taking. A rung must save more than its margin over the rung taken so far. It must also save enough over every rung of a
    lower kind, so that a rung which only ties with the one below is not taken. rungs: those that give up least first."""
    chosen = rungs[0]
    for number, rung in enumerate(rungs[1:], 1):
        lower = [below for below in rungs[:number] if below.kind != rung.kind or below is chosen]
        saved = gain_over(rung, chosen)
        if saved.gain > saved.margin and all(gain_over(rung, below).gain > LEAST_GAIN[rung.kind] for below in lower):
            chosen = rung
    return chosen


def advise(
    profile: Profile, cluster: Cluster, *, gpu: str = "", memory_gbps: float | None = None, standard: Standard = SAFELY, codecs: Sequence[str] = (),
    measured: Measured | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The advice. gpu, memory_gbps, measured: for the codec times that the profile lacks, as ``with_codec_times`` takes them; standard: of
    quality; codecs: the codecs to consider, by default the usual ones."""
    asked = tuple(codecs) or considered(profile)
    timed = with_codec_times(profile, asked, gpu=gpu, memory_gbps=memory_gbps, measured=measured)
    known = [name for name in asked if codecs or {name, name.partition(":")[0]} & timed.profile.codecs.keys()]
    every_step = ladder(timed, cluster, known, standard=standard)
    found = [*every_step, *_worth_listing(rarely(timed, cluster, known), every_step[0])]
    none, bf16 = found[0], found[1]
    chosen = climb([one for one in found if one.sound and one.runs])
    regime = _regime(found)
    overall, over_bf16 = gain_over(chosen, none), gain_over(chosen, bf16)
    return {
        "verdict": chosen.kind, "choice": chosen.name, "runs": chosen.runs, "iteration_ms": chosen.iteration_us(NOMINAL) / 1e3,
        "gain": overall.gain, "margin": overall.margin, "gain_over_bf16": over_bf16.gain, "margin_over_bf16": over_bf16.margin,
        "best_that_psgc_carries": chosen.name,
        "in_any_version": {"verdict": regime.kind, "choice": regime.name, "iteration_ms": regime.iteration_us(NOMINAL) / 1e3},
        "why": _why(profile, cluster, found, chosen), "notes": _notes(timed, cluster, found, asked, known, standard=standard),
        "needed_ratio_over_bf16": _finite(needed_ratio(profile, cluster)), "candidates": [_shown(one, none, bf16) for one in found],
    }  # fmt: skip


def advised_codec(
    profile: Profile, cluster: Cluster, *, gpu: str = "", standard: Standard = SAFELY, measured: Measured | None = None
) -> tuple[str, str]:  # fmt: skip
    """The codec that ``advise`` takes, or would take if it took one, among those that run under a plan; and a note that says which, and why it is not the
    advice where it is not. "" if there is none."""
    asked = [name for name in considered(profile) if standard.keeps(name) and not is_whole(name)]
    timed = with_codec_times(profile, asked, gpu=gpu, measured=measured)
    found = ladder(
        timed, cluster, [name for name in asked if {name, name.partition(":")[0]} & timed.profile.codecs.keys()], standard=standard
    )
    rungs = [one for one in found if one.sound and one.runs]
    codecs = [one for one in rungs if one.kind == "compress"]
    if not codecs:
        return "", ""
    chosen = climb(rungs)
    if chosen.kind == "compress":
        return chosen.name, f"codec {chosen.name}, since none was chosen: the one that psgc advise takes here, of {_names(codecs)}"
    best = climb(codecs)
    saved = gain_over(best, chosen)
    over = f"saves {saved} of an iteration over that" if saved.gain > 0 else "saves nothing over that"
    return best.name, (
        f"codec {best.name}, since none was chosen; psgc advise takes {chosen.name} here: {best.name} {over}, and a codec must save "
        f"{LEAST_GAIN['compress']:.0%}, and more than its margin"
    )


def _names(candidates: Sequence[Candidate]) -> str:
    return ", ".join(one.name for one in candidates)


def _regime(found: Sequence[Candidate]) -> Candidate:
    """The best rung for this link, whether this version runs it or not, and local steps, which run and are never the advice."""
    every = [one.in_any_version for one in _in_every_step(found)]
    return climb([climb([one for one in every if one.sound]), _local(found)])


def _in_every_step(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that train as ever."""
    return [one for one in found if one.kind != "infrequent"]


def _worth_listing(rare: Sequence[Candidate], none: Candidate) -> list[Candidate]:
    """Local steps, and of the others those that take less time than uncompressed gradients."""
    return [one for number, one in enumerate(rare) if number == 0 or one.iteration_us(NOMINAL) < none.iteration_us(NOMINAL)]


def _local(found: Sequence[Candidate]) -> Candidate:
    """Local steps, the simplest of the other optimizers."""
    return next(one for one in found if one.kind == "infrequent")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(one: Candidate, none: Candidate, bf16: Candidate) -> dict[str, Any]:
    overall, over_bf16 = gain_over(one, none), gain_over(one, bf16)
    return {
        "name": one.name, "kind": one.kind, "iteration_ms": one.iteration_us(NOMINAL) / 1e3, "gain": overall.gain, "margin": overall.margin,
        "gain_over_bf16": over_bf16.gain, "margin_over_bf16": over_bf16.margin, "ratio_fp32": 4 / one.bytes_per_element,
        "ratio_bf16": 2 / one.bytes_per_element, "times": one.times, "sound": one.sound, "carried": bool(one.runs), "runs": one.runs,
        "not_carried_yet_ms": None if one.later_us is None else one.later_us(NOMINAL) / 1e3, "encodes": one.encodes,
        "compressed_share": one.compressed_share, "residual_bytes": one.residual_bytes, "server_residual_bytes": one.server_bytes,
    }  # fmt: skip


def _why(profile: Profile, cluster: Cluster, found: Sequence[Candidate], chosen: Candidate) -> str:
    return f"{_hides(profile, cluster)}. {_worth(found, chosen)}.{_not_yet(found, chosen)}"


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
    return f"{text}: {f'{_number(ratio)} times fewer bytes would hide' if math.isfinite(ratio) else 'no ratio would hide its latency, in however many buckets'}"


def _number(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def _worth(found: Sequence[Candidate], chosen: Candidate) -> str:
    """How much the choice saves over fp32 and over bf16, with the numbers."""
    none, bf16 = found[0], found[1]
    takes = f"an iteration takes {_ms(chosen)} ms"
    further = _further(found, chosen)
    if chosen.kind == "none":
        return f"Leave gradients in fp32, uncompressed: {takes}{further}"
    if chosen.kind == BF16:
        return f"Send bf16 gradients, uncompressed: {takes}, {gain_over(chosen, none)} less than with fp32 ({_ms(none)} ms){further}"
    over_bf16 = gain_over(chosen, bf16)
    return (
        f"With {chosen.name} {takes}, {over_bf16} less than with bf16 ({_ms(bf16)} ms) and {gain_over(chosen, none)} less than with fp32 "
        f"({_ms(none)} ms){further}"
    )


def _ms(one: Candidate) -> str:
    return ms(one.iteration_us(NOMINAL))


def _further(found: Sequence[Candidate], chosen: Candidate) -> str:
    """How much the fastest other candidate that runs today would save over the choice."""
    others = [one for one in found if one.sound and one.runs and one is not chosen]
    best = min(others, key=lambda one: one.iteration_us(NOMINAL))
    more = gain_over(best, chosen)
    if more.gain < LEAST_WORTH_SAYING:
        return ""
    why = "within its margin" if more.gain <= more.margin else f"under the {LEAST_GAIN[best.kind]:.0%} that would be worth it"
    return f"; {best.name} would save {more} more, {why}"


def _not_yet(found: Sequence[Candidate], chosen: Candidate) -> str:
    """The candidates that would save time but are not advised: the fastest codec of those that this version does not run, and local steps, which change what is
    trained."""
    text = ""
    later = [one.in_any_version for one in _in_every_step(found) if one.sound and (one.later_us is not None or not one.runs)]
    best, local = min(later, key=lambda one: one.iteration_us(NOMINAL), default=None), _local(found)
    if best is not None and gain_over(best, chosen).gain > LEAST_GAIN["compress"]:
        text = f" What this version does not run would take: {best.name} by other collectives or on GPUs {_ms(best)} ms."
    if gain_over(local, chosen).gain > LEAST_GAIN["infrequent"]:
        steps = local.name.partition("-")[2]
        text += f" Local steps with an exchange every {steps} (psgc.DiLoCo) would take {_ms(local)} ms: another optimizer, whose loss is to be watched."
    return text


def _of_hosts(cluster: Cluster) -> str:
    """The assumptions about the machines that encoding on CPUs rests on."""
    copied = f"copied to them at {cluster.host.gbps:g} Gbit/s a GPU" if cluster.host is not None else "taken to be in their memory already"
    threads = (
        f"{cluster.cores} cores of a node, {cluster.threads_of_a_worker} threads a worker"
        if cluster.cores
        else "a node encodes one part at a time"
    )
    return f"CPUs: {threads}; gradients are {copied}"


def _notes(
    timed: Timed, cluster: Cluster, found: Sequence[Candidate], asked: Sequence[str], known: Sequence[str], *, standard: Standard
) -> list[str]:  # fmt: skip
    """The assumptions that the answer rests on, one line each."""
    profile = timed.profile
    notes = [f"ready times: {profile.source or 'as in the profile'}", f"links: {cluster.source}"]
    if profile.forward_us is None:
        notes.append("the profile has no forward time: an iteration is taken to be backward and synchronization")
    on_gpus = profile.device == "cuda"
    encoders = "on GPUs or on CPUs" if on_gpus else "on CPUs"
    notes.append(
        f"none and bf16 run today by all-reduce, as DistributedDataParallel sends gradients; codecs by psgc run, encoded {encoders}, over servers or "
        "among workers"
    )
    if not cluster.servers and _in_every_step(found)[2:]:
        notes.append("servers, for codecs that need them: one on each node, sharing its link, since --servers names none")
    notes += timed.notes
    if timed.estimated:
        notes.append("margins allow for half as much again of times that are estimated")
    notes.append(_of_hosts(cluster))
    missing = [name for name in asked if name not in known]
    if missing:
        notes.append(f"left out: {', '.join(missing)}, without times in the profile; measure them with psgc profile")
    notes += _lacking(found)
    keeping = [one for one in found if one.residual_bytes]
    if keeping:
        most, servers = max(one.residual_bytes for one in keeping), max(one.server_bytes for one in keeping)
        beside = f", and {gigabytes(servers)} over the servers, which encode the sum" if servers else ""
        notes.append(
            f"memory: {', '.join(one.name for one in keeping)} keep residuals (what error feedback has not sent yet): up to {gigabytes(most)} in each "
            f"worker{beside}"
        )
    notes += [f"quality: not advised: {line}" for line in standard.told_of(one.name for one in found if one.sound is False)]
    most_encodes = max((one.encodes for one in found), default=0)
    if most_encodes > 1:
        notes.append(
            f"quality: gradients are encoded up to {most_encodes} times on the way to the mean, by servers included; each encoding loses a little"
        )
    notes.append("bf16: gradients that are bf16 when they are ready, or cast at no cost")
    if standard.level == EXACT:
        notes.append("quality: a cast to bf16 changes gradients of float32, so if yours are, --quality exact leaves none, as in psgc plan")
    notes += told_of_intervals(found, profile)
    notes.append(told_of_losses())
    return notes


def _lacking(found: Sequence[Candidate]) -> list[str]:
    """Why candidates do not run, one line for each reason."""
    return [f"{one.name} does not run today: {one.lacking}" for one in found if one.lacking]
