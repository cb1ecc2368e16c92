"""What a run tells of itself: where the figures come from, and when nothing is said."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from psgc.config import Config
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.torch.session import run_report
from psgc.torch.session.run_report import RunReport, described
from psgc.worker.rest import Rest


class Clock:
    """Time passes as told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Job:
    """A session of rank ``rank`` whose steps are waited for as long as a test says."""

    def __init__(self, clock: Clock, rank: int = 0, **config: Any) -> None:
        self.clock, self.rank, self.size, self.failed = clock, rank, 2, False
        self.whole = self
        self.config = Config(root_host="somewhere", root_port=1, nodes=2, **config)
        self.wait_s, self.waited_s = 0.0, 0.0
        self.trace = self.figures = None
        self.rest = Rest()
        self.counted = {"gradient_bytes": 0, "uncompressed_bytes": 0, "slowest_rank": -1}

    def wait(self, tickets: Any) -> None:
        self.clock.now += self.wait_s

    def note_waited(self, seconds: float) -> None:
        self.waited_s += seconds

    def statistics(self) -> dict[str, int]:
        return self.counted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(run_report, "time", clock)
    return clock


def step(report: RunReport, name: str = "optimizer0") -> None:
    report.wait(name, [])
    report.step_over(name)


def run(job: Job, steps: int, compute_s: float, wait_s: float) -> RunReport:
    report = RunReport(job)  # type: ignore[arg-type]
    for _ in range(steps):
        job.clock.now += compute_s
        job.wait_s = wait_s
        step(report)
    return report


def layout_of(codec: str, *numels: int, fuse_bytes: int = 1 << 20) -> Any:
    tensors = tuple(TensorSpec(f"t{i}", (numel,), "float32") for i, numel in enumerate(numels))
    order = tuple(range(len(tensors)))
    declaration = Declaration(
        name="optimizer0", kind="plan", tensors=tensors, codec=codec, mean=True, order=order, used=order, part_bytes=4 << 20,
        fuse_bytes=fuse_bytes, min_compress_bytes=4096,
    )  # fmt: skip
    return build_layout(declaration, layout_id=1, servers=1, workers=2, used_by_all=frozenset(order))


def test_the_first_line_says_codec_buckets_and_bytes_a_step() -> None:
    assert described(layout_of("none", 1000, 24), 0) == (
        "optimizer0: 2 tensors (1,024 elements) in 1 bucket, codec none; each worker sends and receives 8.19 kB a step, "
        "as much as fp32, 2.0x as much as bf16"
    )
    assert "codec bf16; each worker sends and receives 4 MB a step, 2.0x less than fp32, as much as bf16" in described(
        layout_of("bf16", 1_000_000), 0
    )
    script = described(layout_of("functions:name=mine/relay", 1_000_000), 0)
    assert script.endswith("sends and receives at most 12.1 MB a step, fp32 8 MB"), (
        "what a script's own codec sends is not known beforehand"
    )
    for varying in ("topk", "sparseloco"):
        assert "each worker sends and receives at most " in described(layout_of(varying, 1_000_000), 0), "it depends on the values"
    assert "in 2 buckets, codec onebit (1 bucket), none (1 bucket); " in described(layout_of("onebit", 100_000, 9, fuse_bytes=0), 0)


def test_the_first_step_is_no_steps_time_and_its_waiting_is_not_counted(clock: Clock) -> None:
    job = Job(clock)
    job.counted |= {"gradient_bytes": 25, "uncompressed_bytes": 1000}
    report = RunReport(job)  # type: ignore[arg-type]
    job.wait_s = 30
    step(report)
    job.wait_s = 0.25
    for _ in range(10):
        clock.now += 0.75
        step(report)
    assert job.waited_s == 2.5
    assert report.summary() == (
        "11 steps, 1.0 s each (median); gradients took 25 bytes instead of 1 kB uncompressed (saved 98 %); "
        "rank 0 waited 2.5 s of 10.0 s for gradients"
    )


@pytest.mark.parametrize(
    ("slowest", "least_ms", "most_ms", "said"),
    [
        (1, 2000, 10000, ": 8.0 s for slower ranks (rank 1 was the slowest), 2.0 s for network and servers"),
        (1, 9900, 10000, ": network and servers; no rank was much slower than the others"),
        (0, 10000, 30000, ": network and servers; it was the slowest rank, others waited for it, up to 20.0 s"),
        (2, 9900, 30000, ": network and servers; rank 2 was no faster, others waited for both"),
    ],
)
def test_who_is_waited_for_is_the_rank_that_waited_least(clock: Clock, slowest: int, least_ms: int, most_ms: int, said: str) -> None:
    job = Job(clock)
    job.counted |= {"slowest_rank": slowest, "least_waited_ms": least_ms, "most_waited_ms": most_ms}
    assert run(job, 11, compute_s=1, wait_s=1).summary().endswith(f"rank 0 waited 10.0 s of 20.0 s for gradients{said}")


def test_a_step_of_several_backwards_that_travel_is_one_step(clock: Clock) -> None:
    job = Job(clock)
    report = RunReport(job)  # type: ignore[arg-type]
    for _ in range(3):
        for _ in range(2):
            clock.now, job.wait_s = clock.now + 1, 0.5
            report.wait("optimizer0", [])
        report.step_over("optimizer0")
    assert report.summary() == "3 steps, 3.0 s each (median); rank 0 waited 2.0 s of 6.0 s for gradients"


def test_a_run_whose_steps_are_not_told_of_says_so_unless_a_step_is_seen(clock: Clock) -> None:
    job, told = Job(clock), Job(clock)
    report = RunReport(job)  # type: ignore[arg-type]
    for _ in range(3):
        report.means_came("ddp0", 0.0)
    assert "no optimizer's step() followed" in report.summary()
    assert "no optimizer's" not in run(told, 3, 0.1, 0.0).summary()
    report.step_over("ddp0")
    report.means_came("ddp0", 0.0)
    assert report.summary().startswith("4 steps")
    assert "no optimizer's" not in report.summary()


def test_two_optimizers_are_one_run(clock: Clock) -> None:
    job = Job(clock)
    report = run(job, 3, 1, 0)
    step(report, "optimizer1")
    step(report, "optimizer0.momentum")
    assert report.summary().startswith("4 steps of 2 optimizers, 1.0 s each (median)")


def test_at_info_every_so_many_steps_have_a_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="psgc"):
        job = Job(clock, log_steps=4)
        job.counted = {"gradient_bytes": 250, "uncompressed_bytes": 1000, "slowest_rank": 1, "least_waited_ms": 100, "most_waited_ms": 1000}
        run(job, 9, compute_s=0.5, wait_s=0.5)
        run(Job(clock, rank=1, log_steps=4), 9, compute_s=0.5, wait_s=0.5)
        run(Job(clock, log_steps=0), 9, compute_s=0.5, wait_s=0.5)
        run(Job(clock, log_steps=9), 9, compute_s=0.5, wait_s=0.5)
    assert caplog.messages == [
        "optimizer0 step=4 step_ms=1000.0 bytes=250 ratio=4.00 waited_s=1.5 of_s=3.0 slowest_rank=1",
        "optimizer0 step=8 step_ms=1000.0 bytes=250 ratio=4.00 waited_s=3.5 of_s=7.0 slowest_rank=1",
        "optimizer0 step=9 step_ms=1000.0 bytes=0 ratio=1.00 waited_s=4.0 of_s=8.0 slowest_rank=none",
    ]


def test_only_rank_0_of_a_real_job_speaks_and_not_where_nothing_was_synchronised(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    layout = layout_of("none", 1000)
    with caplog.at_level(logging.INFO, logger="psgc.run"):
        for job in (Job(clock, rank=1), Job(clock)):
            run_report.report_of(job).laid_out(layout)  # type: ignore[arg-type]
            assert len(caplog.messages) == (job.rank == 0)
            caplog.clear()
            run_report.tell_end(job)  # type: ignore[arg-type]
            assert not caplog.messages, "no step was synchronised"
            step(run_report.report_of(job))  # type: ignore[arg-type]
            run_report.tell_end(job)  # type: ignore[arg-type]
            assert len(caplog.messages) == (job.rank == 0)
        caplog.clear()
        alone = Job(clock)
        alone.config = Config()
        run_report.report_of(alone).laid_out(layout)  # type: ignore[arg-type]
        step(run_report.report_of(alone))  # type: ignore[arg-type]
        run_report.tell_end(alone)  # type: ignore[arg-type]
        assert not caplog.messages, "a job of one sends nothing"


@pytest.mark.parametrize(("nbytes", "said"), [(0, "0 bytes"), (999, "999 bytes"), (1234, "1.23 kB"), (999_600, "1 MB"), (2.5e12, "2.5 TB")])
def test_amounts_have_three_digits(nbytes: float, said: str) -> None:
    assert run_report.amount(nbytes) == said
