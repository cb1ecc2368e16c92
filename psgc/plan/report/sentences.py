"""The sentences that ``psgc plan`` prints about an assessed plan: the verdict, quality, memory, whether a job can run it, and the bound.

Owns the words; ``assessment`` has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from psgc.plan.model.options import encodes, is_program
from psgc.plan.model.plan import UNCOMPRESSED, PlannedBucket
from psgc.plan.model.problem import Problem
from psgc.plan.model.quality import encodings, residual_bytes, server_residual_bytes
from psgc.plan.report.assessment import BEST, Assessment
from psgc.plan.report.wording import counted, gigabytes, longer, ms, percent


class Spread(NamedTuple):
    """Errors of predicted steps, as shares of the measured ones. low: how many of the cells were predicted too low."""

    cells: int
    low: int
    lowest: float
    median: float
    highest: float


# Of the tables of jobs in docs/predicted-and-measured.md, "Jobs over servers" and "Among workers"; a test counts them there.
STEPS_MEASURED: Final = Spread(48, 47, -0.239, -0.04, 0.004)
WORTH_TELLING: Final = 10.0  # a lower bound that a plan exceeds by more than this factor is not worth telling


def codec_names(problem: Problem) -> str:
    """The codecs that buckets may be encoded with, in words."""
    return " and ".join(codec.name for codec in problem.used) or UNCOMPRESSED


def verdict(assessed: Assessment) -> str:
    """Whether to compress, how much that saves over fp32 and over bf16, how sure that is, and how the method's plan compares with the best."""
    said = _compression_verdict(assessed)
    if assessed.method == BEST or not assessed.best.step_us:
        return said
    more = assessed.found.step_us / assessed.best.step_us - 1
    return f"{said}; the plan of {assessed.method} takes {longer(more)} than that of {BEST}"


def _sureness(assessed: Assessment) -> str:
    """The margin, where the model's error was measured."""
    return "not verified" if assessed.problem.profile.correction is None else f"+-{percent(assessed.margin)}"


def _compression_verdict(assessed: Assessment) -> str:
    if assessed.encoded is None:
        return f"no compression, since {_why_none(assessed.problem)}: {ms(assessed.plain.step_us)} ms without it"
    if not assessed.plain.step_us:
        return "do not compress: a step takes no time without it"
    gain, margin, codec = assessed.gain, assessed.margin, codec_names(assessed.problem)
    peer = assessed.peer.step_us
    place = "uncompressed" if peer == assessed.plain.step_us else "uncompressed by all-reduce, as DistributedDataParallel sends them"
    said = (
        f"with {codec} the step takes {longer(-gain)} ({_sureness(assessed)}): {ms(assessed.encoded_us)} ms in place of {ms(peer)} {place}"
    )
    said += _beside_bf16(assessed)
    if gain > margin:
        return f"{_compress(assessed)}: {said}"
    written = "" if assessed.method != BEST else "; the plan compresses all the same, as asked" if _encodes(assessed) else ""
    if gain < -margin:
        return f"do not compress: {said}{written}"
    if abs(gain) < margin and not _search_encodes(assessed):
        return f"do not compress, there is nothing to gain: {said}{written}"
    return f"a tie, so do not compress: {said}{written or '; --force plans it all the same, to be measured'}"


def _why_none(problem: Problem) -> str:
    """Why no bucket can be encoded."""
    if not problem.used:
        return "the codec is none"
    if not problem.constraints.devices or problem.constraints.most_encodes == 0:
        return "the constraints forbid it"
    return f"no option that is left encodes with {codec_names(problem)}"


def verified(problem: Problem) -> str:
    """What predicted steps are worth: by the steps that ``psgc verify`` measured, if the profile has any."""
    correction = problem.profile.correction
    if correction is None:
        return not_verified()
    names = ", ".join(str(step.get("name", "?")) for step in correction.steps)
    where = f" on {correction.cluster}" if correction.cluster else ""
    return (
        f"predicted by corrected costs: psgc verify measured steps of {names or 'a job'}{where} ({correction.date[:10] or 'undated'}), and corrected "
        f"predictions are within {percent(correction.error)} of them"
    )


def about_held_back(assessed: Assessment) -> tuple[str, ...]:
    """Why the buckets are those that the codec has without a plan; nothing where they are planned."""
    planned = assessed.held_back
    if planned is None:
        return ()
    codec = assessed.problem.codec.name if _encodes(assessed) else UNCOMPRESSED
    return (
        f"the buckets are those of --codec {codec} without a plan: planned ones are predicted to take {ms(planned.step_us)} ms, quicker by too little to rely "
        f"on before it is verified; --force plans them, and psgc verify measures them beside these",
    )


def not_verified() -> str:
    """What a predicted step is worth until it has been measured."""
    spread = STEPS_MEASURED
    return (
        f"not verified: predicted, not measured; of {spread.cells} jobs that were measured (docs/predicted-and-measured.md), {spread.low} took longer "
        f"than predicted: errors from -{percent(-spread.lowest)} to +{percent(spread.highest)}, the median -{percent(-spread.median)}"
    )


def _compress(assessed: Assessment) -> str:
    """The advice if compression pays over fp32."""
    what = "compress"
    if assessed.bf16 is not None and not assessed.over_bf16.sure:
        what = "send bf16 gradients, or compress"
    return f"{what}, at a cost in quality" if unsound(assessed) else what


def _beside_bf16(assessed: Assessment) -> str:
    """The steps with bf16 and with compression, and which one is shorter."""
    if assessed.bf16 is None:
        return ""
    codec, over, half = codec_names(assessed.problem), assessed.over_bf16, ms(assessed.bf16.step_us)
    said = f"; bf16 gradients take {half} ms uncompressed"
    if over.sure:
        return f"{said}, and {codec} saves {percent(over.gain)} of that"
    if assessed.gain > assessed.margin:
        more = f"{codec} takes {longer(-over.gain)}"
        return f"{said}, so all of the gain is bf16's ({more})"
    return said


def _encodes(assessed: Assessment) -> bool:
    return any(encodes(bucket.option) for bucket in assessed.found.buckets)


def _search_encodes(assessed: Assessment) -> bool:
    """Whether the plan that the search found encodes any bucket."""
    return assessed.encoded is not None and assessed.searched_encodes


def unsound(assessed: Assessment) -> list[str]:
    """The codecs of the compressed plan that cost quality under the optimizer."""
    used = {bucket.codec for bucket in assessed.encoded or () if encodes(bucket.option)}
    return sorted(codec for codec in used if not assessed.standard.keeps(codec))


def about_quality(assessed: Assessment) -> list[str]:
    """Lines on the quality that the compressed plan costs; none if there is no such plan."""
    lines = [f"quality: {line}" for line in assessed.standard.told_of(unsound(assessed))]
    if _encodes(assessed):
        lines.append(f"quality: {_encodings_text(assessed)}")
    return lines


def _encodings_text(assessed: Assessment) -> str:
    buckets = assessed.found.buckets
    counts = [encodings(bucket) for bucket in buckets]
    most = max(counts)
    text = f"{counted(sum(count > 0 for count in counts), 'bucket')} of {len(counts)} encoded, {counted(most, 'time')} at most on the way to the mean"
    if any(".pull.c" in action for bucket in buckets for action in bucket.option):
        text += ", by servers included"
    if most > 1:
        text += "; each encoding loses a little"
    if assessed.once is not None:
        text += f"; with one encoding at most (most_encodes = 1 in --constraints) the step takes {ms(assessed.once.step_us)} ms"
    return text


def about_memory(buckets: tuple[PlannedBucket, ...]) -> list[str]:
    """A line on the memory of residuals; none if the codecs keep none."""
    worker, servers = residual_bytes(buckets), server_residual_bytes(buckets)
    if not worker and not servers:
        return []
    beside = f", and {gigabytes(servers)} over the servers" if servers else ""
    return [f"memory: residuals (what error feedback has not sent yet) take {gigabytes(worker)} in each worker{beside}"]


# What jobs do with collectives of gradients on GPUs, beside what the cluster's file says of them.
_COLLECTIVES: Final = {
    "host": "; it moves the data of collectives through hosts' memory, as predicted",
    "nccl": "; set PSGC_COLLECTIVES=nccl, by which collectives go from GPU to GPU, as predicted: otherwise they pass hosts' memory",
}


def about_running(assessed: Assessment) -> str:
    """Whether a job of this version runs the plan, and what one can run instead."""
    found = assessed.running
    if found.as_predicted:
        elsewhere = any(is_program(bucket.option) for bucket in assessed.found.buckets) and assessed.problem.profile.device != "cpu"
        return f"this version runs the plan: psgc run --plan{_COLLECTIVES.get(assessed.problem.named.collectives, '') if elsewhere else ''}"
    head = _stopped(found.refused, assessed.found.buckets) if found.moved_us is None else _moved(found.moved_us, found.problem)
    if found.instead is None:
        return f"{head}; the constraints leave nothing that jobs carry"
    where = ", a server on each node added" if found.problem.cluster.servers and not assessed.problem.cluster.servers else ""
    encoded = "" if any(encodes(bucket.option) for bucket in found.instead.buckets) else ", uncompressed"
    why = f" ({found.without})" if found.without else ""
    can = "that can run today" if found.refused else "for that"
    return f"{head}; the best plan {can}, by --runnable{where}, takes {ms(found.instead.step_us)} ms{encoded}{why}"


def _stopped(refused: Sequence[int], buckets: Sequence[PlannedBucket]) -> str:
    return (
        f"this version cannot run the plan: {len(refused)} of its {counted(len(buckets), 'bucket')} take what jobs do not carry, such as "
        f"{' '.join(buckets[refused[0]].option)}"
    )


def _moved(moved_us: float, in_job: Problem) -> str:
    return (
        f"this version runs the plan: psgc run --plan; but it moves collectives between GPUs through hosts' memory, since the cluster's file names nothing "
        f"else, and the step then takes {ms(moved_us)} ms, at {in_job.named.intra.gbps:g} Gbit/s within a node at most. If they will go from GPU to GPU "
        '(PSGC_COLLECTIVES=nccl), say collectives = "nccl" there'
    )


def from_best(assessed: Assessment) -> str:
    """By how much other plans could be shorter, at most."""
    texts = []
    for bound, what in ((assessed.bounds.given_us, "other options for these buckets"), (assessed.bounds.any_us, "other buckets")):
        told = assessed.found.step_us < bound * WORTH_TELLING
        texts.append(
            f"{what} could make the step {percent(max(1 - bound / assessed.found.step_us, 0.0))} shorter at most"
            if told
            else f"how much shorter {what} could make the step is not known"
        )
    return "; ".join(texts)
