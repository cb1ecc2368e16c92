"""Every figure that psgc shows of a running job, with its name, unit and meaning: one table, which ``psgc top``, the status page, metrics for Prometheus and
``psgc.torch.metrics()`` read alike. docs/observation.md shows it; a test compares the two.

Pure. A member's figures are computed from its report and from the increase of its counts over some past: since the report before, or since it joined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from psgc.observe.slow import Slow
from psgc.wire.reports import COUNTS, NOW, Report

Value = float | int | str | None | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """name: in documents and dicts. role: whose it is. value: of a report and its increase; None: not known; a mapping has a value for each ``label``.
    exported: the name in Prometheus, after ``psgc_``, in base units, ``_total`` for a count; "": Prometheus computes it of others by itself. factor: from the
    value's unit to the exported one."""

    name: str
    unit: str
    role: Literal["worker", "server", "any"]
    value: Callable[[Report, Report], Value]
    meaning: str
    exported: str = ""
    factor: float = 1.0
    label: str = ""

    @property
    def counts(self) -> bool:
        """Whether it only grows, from the moment at which the member joined."""
        return self.exported.endswith("_total")

    def is_of(self, role: str) -> bool:
        return self.role in ("any", role)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _permille(value: int) -> float:
    return value / 1e3


def _by_key(field: str, number: int) -> Callable[[Report, Report], Value]:
    return lambda now, _: {key: numbers[number] for key, numbers in getattr(now, field).items()}


FIGURES: Final = (
    Figure("steps", "", "worker", lambda now, _: now.steps, "steps that its optimizers have applied; of `DiLoCo`, exchanges", "steps_total"),
    Figure("step_ms", "ms", "worker", lambda now, _: now.step_us / 1e3 or None, "the median of its last 64 steps", "step_seconds", 1e-3),
    Figure(
        "compute_ms", "ms", "worker", lambda now, _: now.compute_us / 1e3 or None,
        "of a step: in which its training thread does not wait for psgc; this and the next two are medians of the last 10 s", "compute_seconds", 1e-3,
    ),
    Figure(
        "encode_ms", "ms", "worker", lambda now, _: now.coding_us / 1e3 if now.compute_us else None,
        "of a step: in which its training thread waits for its own encoding and decoding", "encode_seconds", 1e-3,
    ),
    Figure(
        "wait_ms", "ms", "worker", lambda now, _: now.waits_us / 1e3 if now.compute_us else None,
        "of a step: in which its training thread waits for psgc, for whatever reason", "wait_seconds", 1e-3,
    ),
    Figure(
        "waits", "share", "worker", lambda _, past: min(1.0, past.waited_ms / past.up_ms), "of the time: in which its training thread waits for means"
    ),
    Figure(
        "overlap", "share", "worker", lambda _, past: max(0.0, 1 - past.waited_ms / past.exchange_ms) if past.exchange_ms else None,
        "of the exchange, from a step's first bucket that leaves to its last mean: in which it does not",
    ),
    Figure(
        "ratio", "times", "worker", lambda _, past: _ratio(past.uncompressed_bytes, past.gradient_bytes),
        "payload bytes uncompressed over those that travel",
    ),
    Figure("bytes_per_s", "bytes/s", "any", lambda _, past: 1e3 * past.wire_bytes / past.up_ms, "to and from it, headers included"),
    Figure(
        "load", "share", "server", lambda now, past: min(1.0, past.busy_ms / past.up_ms / now.threads) if now.threads else None,
        "of the time: in which its summing threads work",
    ),
    Figure(
        "server_share", "share", "worker", _by_key("servers", 0), "of the last 10 s: in which it has something at that server that is not answered",
        "server_share", label="server",
    ),
    Figure(
        "server_bytes_per_s", "bytes/s", "worker", _by_key("servers", 1), "payloads of gradients to and from that server, over the last 10 s",
        "server_bytes_per_second", label="server",
    ),
    Figure(
        "sending", "share", "worker", _by_key("servers", 2), "of the last 10 s: in which what it sends to that server over TCP is on its way", "sending_share",
        label="server",
    ),
    Figure(
        "late_ms", "ms", "server", _by_key("late", 0),
        "of a step: in which it awaits that rank's contributions, beyond the others'; the median of the last 10 s", "late_seconds", 1e-3, label="rank",
    ),
    Figure(
        "sends_longer", "share", "server", _by_key("late", 1), "of the last 10 s: in which results to that rank are on their way, beyond the other ranks'",
        "sends_longer_share", label="rank",
    ),
    Figure("sums", "share", "server", lambda now, _: _permille(now.sums_permille), "of the last 10 s: in which a sum is under way", "server_sums_share"),
    Figure("loop", "share", "server", lambda now, _: _permille(now.loop_permille), "of the last 10 s: in which its loop works", "server_loop_share"),
    Figure("waited_s", "s", "worker", lambda now, _: now.waited_ms / 1e3, "its training thread has waited for means", "waited_seconds_total"),
    Figure("exchange_s", "s", "worker", lambda now, _: now.exchange_ms / 1e3, "from steps' first buckets to their last means", "exchange_seconds_total"),
    Figure("wire_bytes", "bytes", "any", lambda now, _: now.wire_bytes, "moved in both directions, headers included", "wire_bytes_total"),
    Figure(
        "gradient_bytes", "bytes", "worker", lambda now, _: now.gradient_bytes, "payloads of optimizers' steps, both directions", "gradient_bytes_total"
    ),
    Figure(
        "uncompressed_bytes", "bytes", "worker", lambda now, _: now.uncompressed_bytes, "what these would have been uncompressed",
        "uncompressed_bytes_total",
    ),
    Figure("codec_bytes", "bytes", "worker", _by_key("codecs", 0), "gradient_bytes by codec", "codec_bytes_total", label="codec"),
    Figure(
        "codec_uncompressed_bytes", "bytes", "worker", _by_key("codecs", 1), "uncompressed_bytes by codec", "codec_uncompressed_bytes_total", label="codec"
    ),
    Figure(
        "codec_buckets", "", "worker", _by_key("codecs", 2), "buckets of gradients that travel by a codec now: what auto or a plan has chosen", "codec_buckets",
        label="codec",
    ),
    Figure(
        "residual_ratio", "ratio", "worker", lambda now, _: dict(now.residuals),
        "norm of the residual over that of the gradient, looked at once in 100 steps of a bucket that the CPU encodes", "residual_ratio", label="bucket",
    ),
    Figure(
        "plan_version", "", "worker", lambda now, _: now.plan_version, "layouts that its optimizers have had so far; each choice of auto is a new one",
        "plan_version",
    ),
    Figure("travels", "text", "worker", lambda now, _: now.travels or None, "how gradients travel, in words"),
    Figure("queued", "", "worker", lambda now, _: now.queued, "payloads that wait for servers' credit now", "queued_payloads"),
    Figure(
        "in_flight_bytes", "bytes", "worker", lambda now, _: now.in_flight_bytes, "sent, and not accepted by servers yet (PSGC_CREDIT_BYTES a server)",
        "in_flight_bytes",
    ),
    Figure("resent", "", "worker", lambda now, _: now.resent, "contributions that a lost connection took along, and were sent again", "resent_total"),
    Figure("reconnects", "", "worker", lambda now, _: now.reconnects, "connections to servers that were lost and made again", "reconnects_total"),
    Figure("busy_s", "s", "server", lambda now, _: now.busy_ms / 1e3, "its summing threads have worked, together", "server_busy_seconds_total"),
    Figure("threads", "", "server", lambda now, _: now.threads, "its summing threads", "server_threads"),
    Figure("folds", "", "server", lambda now, _: now.folds, "sums that it has made, of a block of ranks' payloads each", "server_folds_total"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobFigure:
    """A figure that the scheduler alone knows. labels: what tells its several values apart; (): it has one."""

    name: str
    unit: str
    exported: str
    meaning: str
    labels: tuple[str, ...] = ("member",)


SILENT: Final = JobFigure("silent_s", "s", "silent_seconds", "since the scheduler last heard of the member")
AWAITED: Final = JobFigure(
    "awaited", "", "awaited", "1: the job waits for this member now: it is silent, or slow, or waits clearly less than another rank"
)
SLOW: Final = JobFigure(
    "slow",
    "share",
    "slow",
    "of a step: by how much this member is slower than the others, and where: compute, encode, link or server",
    ("member", "where"),
)
MEMBERS: Final = JobFigure("members", "", "members", "members that have joined and not left", ("role",))
WARNINGS: Final = JobFigure("warnings", "", "warnings", "lines that the scheduler has warned of in the last hour", ())
JOB_FIGURES: Final = (SILENT, AWAITED, SLOW, MEMBERS, WARNINGS)


def figures_of(role: str, now: Report, past: Report | None = None) -> dict[str, Value]:
    """A member's figures by name. past: the increase of its counts over the time of which rates are to be; None: since it joined."""
    past = past or now
    return {each.name: each.value(now, past) if past.up_ms else None for each in FIGURES if each.is_of(role)}


def increase(now: Report, before: Report | None) -> Report:
    """A report with the increase of all counts. An earlier report with a longer time is from before a restart and is ignored."""
    if before is None or before.up_ms >= now.up_ms:
        return now
    counts = {name: getattr(now, name) if name in NOW else max(0, getattr(now, name) - getattr(before, name)) for name in COUNTS}
    return Report(**counts)


@dataclass(frozen=True, slots=True)
class Family:
    """A figure as it is exported. labels: names of what tells its values apart; values: each with the labels' own."""

    name: str
    counts: bool
    meaning: str
    labels: tuple[str, ...]
    values: tuple[tuple[tuple[str, ...], float], ...]


def member_families(role: str, member: str, job: int, report: Report) -> list[Family]:
    """What a member exports of itself: all figures that have a name there. member: as everywhere, ``rank 3``."""
    found, common = figures_of(role, report), (str(job), member)
    families = []
    for figure in FIGURES:
        if not figure.exported or not figure.is_of(role):
            continue
        value = found[figure.name]
        by_label = value if isinstance(value, Mapping) else {"": value}
        values = tuple(
            ((*common, label) if figure.label else common, figure.factor * number)
            for label, number in by_label.items()
            if isinstance(number, int | float)
        )
        labels = ("psgc_job", "member", figure.label) if figure.label else ("psgc_job", "member")
        families.append(Family(figure.exported, figure.counts, figure.meaning, labels, values))
    return families


def job_families(
    job: int, members: Mapping[str, float], awaited: Collection[str], slow: Collection[Slow], roles: Mapping[str, int], warnings: int
) -> list[Family]:
    """What the scheduler exports: the figures of ``JOB_FIGURES``. members: that have not left, and for how many seconds each has been silent; roles: how many
    members of each."""
    values: dict[JobFigure, Mapping[tuple[str, ...], float]] = {
        SILENT: {(member,): silent_s for member, silent_s in members.items()},
        AWAITED: {(member,): float(member in awaited) for member in members},
        SLOW: {(one.member, one.where): one.share for one in slow},
        MEMBERS: {(role,): count for role, count in roles.items()},
        WARNINGS: {(): warnings},
    }
    return [
        Family(
            figure.exported,
            False,
            figure.meaning,
            ("psgc_job", *figure.labels),
            tuple(((str(job), *of), value) for of, value in found.items()),
        )
        for figure, found in values.items()
    ]
