"""The alert rules in ops/: a real Prometheus scrapes a real job, and each rule fires for the member that it is about. The dashboard asks for what there is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from psgc.observe.table import FIGURES, JOB_FIGURES
from tests.cluster.test_connections import CuttingProxy
from tests.ports import free_base, free_port

OPS = Path(__file__).parents[2] / "ops"
RULES = OPS / "prometheus-alerts.yml"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian's package prometheus)"
)
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)")
# The rules' times are minutes; a test has seconds. No server of a test is saturated on every machine, so any work counts as much.
SHORTER = (
    ("[2m]", "[8s]"), ("for: 5m", "for: 1s"), ("[1h] offset 30m", "[20s] offset 4s"), ("for: 10m", "for: 1s"), ("[10m]", "[2m]"), ("> 0.9", "> 0.0001"),
)  # fmt: skip
HANG_S = 120.0


def asked_for(text: str) -> set[str]:
    """Names of psgc's series in a text."""
    return set(re.findall(r"\bpsgc_(?!job\b)\w+", text))


def served() -> set[str]:
    return {f"psgc_{each.exported}" for each in (*FIGURES, *JOB_FIGURES) if each.exported}


@needs_promtool
def test_the_rules_are_right_and_fire_on_made_up_series_at_their_own_times() -> None:
    for command in (("check", "rules", RULES.name), ("test", "rules", "prometheus-alerts.test.yml")):
        done = subprocess.run(["promtool", *command], cwd=OPS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_dashboard_ask_for_series_that_are_served() -> None:
    assert asked_for(RULES.read_text()) <= served()
    dashboard = json.loads((OPS / "grafana-dashboard.json").read_text())
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    assert asked_for(expressions) <= served()
    left_out = {"psgc_wire_bytes_total", "psgc_exchange_seconds_total", "psgc_warnings", "psgc_resent_total"}  # of use beside others only
    assert served() - asked_for(expressions) <= left_out | {"psgc_gradient_bytes_total", "psgc_uncompressed_bytes_total"}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


class Prometheus:
    """Scrapes these ports of this machine twice a second."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        rules = RULES.read_text()
        for before, after in SHORTER:
            assert before in rules, before
            rules = rules.replace(before, after)
        (folder / "rules.yml").write_text(rules)
        targets = ", ".join(f"'127.0.0.1:{port}'" for port in ports)
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}\nrule_files: [rules.yml]\n"
            f"scrape_configs:\n  - job_name: psgc\n    static_configs:\n      - targets: [{targets}]\n"
        )
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self._log = (folder / "prometheus.log").open("w+")
        self._popen = subprocess.Popen(
            ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"],
            cwd=folder, stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def ask(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def number(self, query: str) -> float:
        """A query's one value; 0 if there is none yet."""
        found = self.ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def firing(self) -> set[tuple[str, str]]:
        """Rules that fire, each with the member that it is about."""
        try:
            alerts = self.ask("alerts")["alerts"]
        except OSError:  # it is not up yet
            return set()
        return {(alert["labels"]["alertname"], alert["labels"].get("member", "")) for alert in alerts if alert["state"] == "firing"}

    def until(self, *wanted: tuple[str, str]) -> float:
        """Wait until each of these has fired. Returns the seconds that took."""
        began, fired = time.monotonic(), set[tuple[str, str]]()
        while not fired >= set(wanted):
            assert time.monotonic() < began + HANG_S, (set(wanted) - fired, fired)
            time.sleep(0.1)
            fired |= self.firing()
        return time.monotonic() - began

    def close(self) -> None:
        self._popen.terminate()
        self._popen.wait()
        self._log.close()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[list[int]], Prometheus]]:
    made: list[Prometheus] = []

    def make(ports: list[int]) -> Prometheus:
        made.append(Prometheus(tmp_path, ports))
        return made[-1]

    yield make
    for one in made:
        one.close()


@needs_prometheus
@pytest.mark.long  # which rank is slow is told by clocks, and other work on the machine may slow down all of them
@pytest.mark.timeout(600)
def test_each_rule_fires_for_the_member_that_it_is_about(
    make_job: Callable[..., Any], prometheus: Callable[[list[int]], Prometheus], tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    base, port = free_base(0, 1, 2, 3, 100), free_port()
    proxy = CuttingProxy(port, seed=1, bytes_between_cuts=60_000)
    proxy.cutting = False
    env = {"PSGC_METRICS_PORT": str(base), "PSGC_CODEC": "topk", "PSGC_TRANSPORT": "tcp", "PSGC_HEARTBEAT_S": "1", "BYTEPS_LOCAL_SIZE": "3"}
    job = make_job(env=env, nodes=1)
    job.scheduler()
    job.server(DMLC_PORT=str(port), PSGC_ADVERTISE=f"127.0.0.1:{proxy.port}")
    enough = tmp_path / "enough"
    workers = [job.worker(0, str(enough), job="alarming.py", BYTEPS_LOCAL_RANK=str(rank)) for rank in range(3)]
    watched = prometheus([base, base + 1, base + 2, base + 3, base + 100])
    watched.until(("PsgcMemberSlow", "rank 1"), ("PsgcServerSaturated", "server 0"), ("PsgcResidualGrows", "rank 0"))
    firing = watched.firing()
    assert not firing & {("PsgcMemberSlow", "rank 0"), ("PsgcMemberSlow", "rank 2")}
    began = time.monotonic()
    while watched.number("min(psgc_steps_total)") < 500:
        assert time.monotonic() < began + HANG_S
        time.sleep(0.2)
    assert watched.number("count(up == 1)") == 5, "all roles have been scraped through 500 steps"
    proxy.cutting = True
    watched.until(("PsgcReconnects", "rank 0"))
    proxy.cutting = False
    os.kill(workers[1].popen.pid, signal.SIGSTOP)
    try:
        took_s = watched.until(("PsgcMemberSilent", "rank 1"))
        (awaited,) = [each["metric"]["member"] for each in watched.ask("query", query="psgc_awaited == 1")["result"]]
    finally:
        os.kill(workers[1].popen.pid, signal.SIGCONT)
    assert awaited == "rank 1"
    print(f"the alert fired {took_s:.1f} s after SIGSTOP")  # shown by pytest -s: no test asserts a time
    enough.touch()
    assert set(job.end().values()) == {0}, job.text()
    proxy.close()
