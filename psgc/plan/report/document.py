"""An assessed plan as JSON: what ``psgc plan --json`` prints and ``-o`` writes. Times in milliseconds."""

from __future__ import annotations

from typing import Any

from psgc.plan.inputs.profile import Profile
from psgc.plan.model.lanes import busy_us, overlap, spans
from psgc.plan.model.quality import OPTIMIZERS, encodings, residual_bytes, server_residual_bytes
from psgc.plan.planfile.completing import whole_plan
from psgc.plan.report.assessment import BASELINE, Assessment
from psgc.plan.report.sentences import about_memory, about_quality, about_running, codec_names, unsound, verdict


def document(assessed: Assessment) -> dict[str, Any]:
    """The plan and its assessment."""
    problem, found, bounds = assessed.problem, assessed.found, assessed.bounds
    busy = spans(assessed.simulated)
    steps = {name: us / 1e3 for name, us in assessed.steps_us.items()}
    prediction = {
        "method": assessed.method, "codec": codec_names(problem), "step_ms": found.step_us / 1e3, "methods": steps,
        "gain": assessed.gain, "margin": assessed.margin, "verdict": verdict(assessed), **_beside_bf16(assessed), "overlap": overlap(busy),
        "lanes": [{"lane": lane, "busy_ms": us / 1e3} for lane, us in busy_us(busy).items()], "notes": list(assessed.job.notes),
        "quality": _quality(assessed), "memory": _memory(assessed), "running": _running(assessed),
        "held_back_step_ms": None if assessed.held_back is None else assessed.held_back.step_us / 1e3,
    }  # fmt: skip
    plan = whole_plan(problem, found.buckets, assessed.simulated, prediction)
    return {
        **plan.to_json(), "profile": _origin(problem.profile), "optimizer": OPTIMIZERS[not assessed.standard.adam],
        "select_ms": found.select_us / 1e3, "bound_ms": bounds.bound_ms, "options_considered": found.options_considered,
        "step_ms": found.step_us / 1e3, "fp32_step_ms": steps[BASELINE], "runnable": assessed.running.runs,
        "lower_bound_ms": bounds.given_us / 1e3, "lower_bound_any_bucketing_ms": bounds.any_us / 1e3,
    }  # fmt: skip


def _origin(profile: Profile) -> dict[str, str]:
    """The origin of the profile that the plan was made from."""
    return {"hardware": profile.hardware, "date": profile.date, "source": profile.source}


def _beside_bf16(assessed: Assessment) -> dict[str, Any]:
    """bf16_step_ms: the step with bf16 gradients, None if the codec is only a cast; compressed_step_ms: the step of the compressed plan."""
    half, over = assessed.bf16, assessed.over_bf16
    return {
        "uncompressed_step_ms": assessed.peer.step_us / 1e3, "compressed_step_ms": None if assessed.encoded is None else assessed.encoded_us / 1e3,
        "bf16_step_ms": None if half is None else half.step_us / 1e3, "gain_over_bf16": None if half is None else over.gain,
        "margin_over_bf16": None if half is None else over.margin,
    }  # fmt: skip


def _quality(assessed: Assessment) -> dict[str, Any]:
    """encodes: for each bucket, in the plan's order, the number of encodings on the way to the mean, with those by servers."""
    names = unsound(assessed)
    return {
        "optimizer": OPTIMIZERS[not assessed.standard.adam], "level": assessed.standard.level, "sound": not names, "unsound_codecs": names,
        "encodes": [encodings(bucket) for bucket in assessed.found.buckets],
        "one_encode_step_ms": None if assessed.once is None else assessed.once.step_us / 1e3, "told": about_quality(assessed),
    }  # fmt: skip


def _memory(assessed: Assessment) -> dict[str, Any]:
    buckets = assessed.found.buckets
    return {
        "residual_bytes": residual_bytes(buckets),
        "server_residual_bytes": server_residual_bytes(buckets),
        "told": about_memory(buckets),
    }


def _running(assessed: Assessment) -> dict[str, Any]:
    """refused: the indices of the buckets that a job of this version cannot run; moved_step_ms: the step as jobs move the plan's collectives, where that is not
    as predicted; runnable_step_ms: the step of the best runnable plan."""
    found = assessed.running
    instead = assessed.found if found.as_predicted else found.instead
    return {
        "runs": found.runs, "refused": list(found.refused), "moved_step_ms": None if found.moved_us is None else found.moved_us / 1e3,
        "runnable_step_ms": None if instead is None else instead.step_us / 1e3, "told": about_running(assessed),
    }  # fmt: skip
