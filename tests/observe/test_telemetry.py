"""OpenTelemetry gets the figures that Prometheus gets: by what the script has set up, or by OTLP."""

from __future__ import annotations

import http.server
import logging
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from psgc.config import Config
from psgc.observe.exporter import export
from psgc.observe.table import member_families
from psgc.observe.telemetry import observe
from tests.observe.test_metrics import REPORT


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Something that takes OTLP over HTTP: its address, and what it was sent."""
    got: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()


@pytest.mark.filterwarnings("ignore")
def test_where_nothing_is_set_up_the_figures_go_out_by_otlp(collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    metrics = pytest.importorskip("opentelemetry.metrics")
    address, got = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    assert observe(lambda: member_families("worker", "rank 3", 77, REPORT)) == ""
    provider = metrics.get_meter_provider()
    provider.force_flush()
    until = time.monotonic() + 60
    while not got:
        assert time.monotonic() < until
        time.sleep(0.05)
    provider.shutdown()
    sent = b"".join(got)
    for text in (b"psgc.steps", b"psgc.codec_bytes", b"rank 3", b"int8"):
        assert text in sent


def test_without_the_library_one_line_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with caplog.at_level(logging.WARNING):
        assert export(Config(metrics_otel=True), 0, list) is None
        until = time.monotonic() + 60
        while not caplog.records:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert "PSGC_METRICS_OTEL=1: OpenTelemetry gets no figures: opentelemetry-api is missing" in caplog.text
