"""Figures for Prometheus: every role serves its own, they are those of the one table, and watching never ends a job."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from psgc.config import Config
from psgc.launch.pages.figures import rewritten
from psgc.observe import exporter
from psgc.observe.exporter import export
from psgc.observe.figures import Figures
from psgc.observe.slow import Slow
from psgc.observe.table import FIGURES, JOB_FIGURES, figures_of, increase, job_families, member_families
from psgc.wire.reports import MOST_NAMES, Report, shortened
from tests.observe.test_top import be_outside
from tests.plan.commands import psgc
from tests.ports import free_base, free_port

REPORT = Report(
    10_000, 5_000_000, 40, 25_000, 4_000, 1_000, 1_000, 4_000, codecs={"int8": [900, 3_600, 3], "none": [100, 400, 1]}, residuals={"a/0 w": 0.5},
    plan_version=2, travels="as it does", queued=3, in_flight_bytes=7,
)  # fmt: skip
SLOW = Slow("rank 1", "link", 12.5, 0.5, "as the test wants it")
Samples = dict[tuple[str, str], float]  # by name and labels, as text


def scraped(port: int, patience_s: float = 60) -> Samples:
    """What is served at a port of this machine, once there is something."""
    until = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                text = answer.read().decode()
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < until, f"nothing is served at {port}"
            time.sleep(0.1)
            continue
        found = re.findall(r"^(psgc_\w+)(\{.*\})? (\S+)$", text, re.MULTILINE)
        return {(name, labels): float(value) for name, labels, value in found}


def of(samples: Samples, name: str, *labels: str) -> float:
    """The one value of that name whose labels have these texts."""
    (value,) = [value for (other, has), value in samples.items() if other == name and all(label in has for label in labels)]
    return value


def test_everything_that_a_report_says_is_a_figure() -> None:
    """A report of zeros but for one field differs in some figure from one of zeros: no field is sent in vain."""
    other = {
        "travels": "so", "codecs": {"none": [1, 2, 3]}, "residuals": {"b": 0.5}, "servers": {"0": [0.5, 1e6, 0.1]}, "late": {"1": [20.0, 0.1]},
    }  # fmt: skip
    plain = {"up_ms": 1000, "threads": 1, "wire_bytes": 0, "exchange_ms": 10_000, "gradient_bytes": 1, "compute_us": 1}
    for each in fields(Report)[1:]:  # the first is the time by which rates are counted
        with_it = Report(**{**plain, each.name: other.get(each.name, 5_000)})
        assert any(figures_of(role, with_it) != figures_of(role, Report(**plain)) for role in ("worker", "server")), each.name  # type: ignore[arg-type]


def test_the_page_has_the_table_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observation.md").read_text()
    assert rewritten(page) == page, "python -m psgc.launch.pages.figures docs/observation.md"


def test_names_are_unique_and_counts_are_told_from_gauges() -> None:
    for names in ([each.name for each in FIGURES], [each.exported for each in (*FIGURES, *JOB_FIGURES) if each.exported]):
        assert len(set(names)) == len(names)
    kinds = {family.name: family.counts for role in ("worker", "server") for family in member_families(role, "x", 1, REPORT)}
    assert kinds["steps_total"]
    assert kinds["server_busy_seconds_total"]
    assert not kinds["queued_payloads"]


def test_exported_values_are_in_base_units_and_say_whose_they_are() -> None:
    families = {family.name: family for family in member_families("worker", "rank 3", 77, REPORT)}
    assert families["step_seconds"].values == ((("77", "rank 3"), pytest.approx(0.025)),)
    assert families["waited_seconds_total"].values == ((("77", "rank 3"), 1.0),)
    assert families["codec_bytes_total"].labels == ("psgc_job", "member", "codec")
    assert families["codec_bytes_total"].values == ((("77", "rank 3", "int8"), 900), (("77", "rank 3", "none"), 100))
    assert "server_folds_total" not in families
    found = {
        family.name: dict(family.values) for family in job_families(7, {"rank 0": 0.5, "rank 1": 4.0}, ["rank 1"], [SLOW], {"worker": 2}, 3)
    }
    assert found == {
        "silent_seconds": {("7", "rank 0"): 0.5, ("7", "rank 1"): 4.0}, "awaited": {("7", "rank 0"): 0.0, ("7", "rank 1"): 1.0},
        "slow": {("7", "rank 1", "link"): 0.5}, "members": {("7", "worker"): 2}, "warnings": {("7",): 3},
    }  # fmt: skip


def test_what_does_not_count_up_is_not_taken_as_an_increase() -> None:
    later = Report(11_000, 6_000_000, 50, 20_000, queued=1, threads=2)
    grown = increase(later, REPORT)
    assert (grown.up_ms, grown.wire_bytes, grown.steps, grown.queued, grown.threads, grown.step_us) == (1_000, 1_000_000, 10, 1, 2, 20_000)


def test_a_report_that_travels_is_short_however_many_buckets_there_are() -> None:
    long = Report(1, 1, residuals={str(n): n / 3 for n in range(1000)}, codecs={f"topk:k={n}": [n, n, 1] for n in range(1, 100)})
    short = shortened(long)
    assert next(iter(short.residuals.items())) == ("999", 333.0)
    assert len(short.residuals) == len(short.codecs) == MOST_NAMES
    assert shortened(REPORT) == REPORT


def test_a_wait_that_is_under_way_is_seen_and_counted_once() -> None:
    figures = Figures(0.0)
    figures.step_over(None)
    figures.submitted(10.0)
    figures.waits(12.0, counts=True)
    assert figures.so_far(15.0) == (5.0, 3.0)
    figures.means_came(4.0, 16.0, counts=True)
    assert figures.so_far(20.0) == (6.0, 4.0)
    figures.submitted(30.0)
    figures.waits(31.0, counts=False)  # the first step of another optimizer: kernels are compiled
    assert figures.so_far(50.0) == (6.0, 4.0)


@pytest.mark.timeout(300)
def test_each_role_of_a_running_job_is_scraped_and_all_ways_to_look_agree(
    make_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    port = free_base(0, 1, 2, 100)
    job = make_job(env={"PSGC_CODEC": "topk", "PSGC_METRICS_PORT": str(port), "BYTEPS_LOCAL_SIZE": "2"}, nodes=1)
    job.scheduler()
    job.server()
    for local_rank in range(2):
        job.worker(0, "--until", str(tmp_path / "enough"), job="trains.py", BYTEPS_LOCAL_RANK=str(local_rank))
    be_outside(monkeypatch, job)
    until = time.monotonic() + 100
    while not (first := scraped(port + 1)) or of(first, "psgc_steps_total") < 120:
        assert time.monotonic() < until, first
        time.sleep(0.2)
    server, scheduler = scraped(port + 100), scraped(port)
    while not any(name == "psgc_silent_seconds" and 'member="rank 1"' in labels for name, labels in scheduler):
        # what serves it is a process of its own, which hears of each member in turn
        assert time.monotonic() < until, scheduler
        time.sleep(0.2)
        scheduler = scraped(port)
    told = json.loads(psgc("top", "--json").stdout)
    (tmp_path / "enough").touch()
    assert set(job.end().values()) == {0}, job.text()
    assert f'psgc_job="{job.job_id}"' in next(iter(first))[1]
    assert of(first, "psgc_codec_bytes_total", 'codec="topk"') == of(first, "psgc_gradient_bytes_total") > 0
    assert of(first, "psgc_residual_ratio", "optimizer0/0") > 0
    assert of(first, "psgc_codec_buckets", 'codec="topk"') == of(first, "psgc_plan_version") == 1
    assert of(server, "psgc_server_folds_total", 'member="server 0"') > 100
    assert of(server, "psgc_server_threads") >= 1
    assert of(scheduler, "psgc_members", 'role="worker"') == 2
    assert of(scheduler, "psgc_silent_seconds", 'member="rank 1"') < 30
    row = told["workers"][0]
    assert row["steps"] >= of(first, "psgc_steps_total") - 200
    assert set(row) >= {each.name for each in FIGURES if each.is_of("worker")}
    assert row["codec_bytes"].keys() == {"topk"}
    assert told["events"][0]["text"].startswith("everyone is there")
    assert any("codec topk" in event["text"] for event in told["events"])


def test_a_taken_port_is_one_line_and_the_job_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert export(Config(metrics_port=port - 1), 1, list) is None
    (record,) = caplog.records
    assert f"cannot listen at 127.0.0.1 port {port}" in record.message
    assert "the job goes on" in record.message


def test_without_the_library_one_worker_of_a_machine_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert export(Config(metrics_port=free_port(), local_rank=1, local_size=2), 2, list) is None
    assert not caplog.records
    assert export(Config(metrics_port=free_port()), 1, list) is None
    assert "pip install 'psgc[watch]'" in caplog.records[0].message


def test_nothing_is_served_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "Exporter", None)  # would raise
    assert Config.from_env({}).metrics_port == 0
    assert export(Config(), 1, list) is None


def test_a_port_is_free_again_once_an_exporter_is_closed() -> None:
    pytest.importorskip("prometheus_client")
    config = Config(metrics_port=free_port())
    for _ in range(2):
        served = export(config, 0, lambda: member_families("worker", "rank 0", 1, REPORT))
        assert served is not None
        assert of(scraped(config.metrics_port), "psgc_queued_payloads") == 3
        served.close()
