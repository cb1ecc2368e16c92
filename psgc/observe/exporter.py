"""Figures for Prometheus: an HTTP server of one process (scrapes.py), which asks for them when somebody scrapes; prometheus-client writes them down. Nothing is
counted twice, and nothing is done between two scrapes.

Watching never ends a job: without the library, or where the port is taken, a line says so and the job goes on without.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from psgc.config import Config
from psgc.observe.scrapes import ScrapeServer
from psgc.observe.table import Family

logger = logging.getLogger(__name__)
INSTALL: Final = "pip install 'psgc[watch]'"
OF_WORKERS: Final = 1  # added to PSGC_METRICS_PORT, with the local rank; the scheduler adds nothing
OF_SERVERS: Final = 100  # and with the server's index
Families = Callable[[], Iterable[Family]]


class Exporter:
    """Serves until ``close``. families: asked for in a thread of its own."""

    def __init__(self, client: Any, address: str, port: int, families: Families) -> None:
        """client: prometheus_client. Raises OSError where the port cannot be had."""
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(_Collector(importlib.import_module("prometheus_client.core"), families))
        client.ProcessCollector(registry=registry)
        self._server = ScrapeServer(address, port, lambda: client.generate_latest(registry))

    def close(self) -> None:
        self._server.close()


class _Collector:
    def __init__(self, core: Any, families: Families) -> None:
        self._core, self._families = core, families

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        for family in self._families():
            kind = self._core.CounterMetricFamily if family.counts else self._core.GaugeMetricFamily
            made = kind(f"psgc_{family.name}", family.meaning, labels=family.labels)
            for labels, value in family.values:
                made.add_metric(labels, value)
            yield made


def export(config: Config, offset: int, families: Families) -> Exporter | None:
    """Serve at PSGC_METRICS_PORT + offset, if the port is set. Says in one line why it cannot."""
    if config.metrics_otel:
        threading.Thread(target=_to_opentelemetry, args=(families,), name="psgc-otel", daemon=True).start()  # its import takes a second
    if not config.metrics_port:
        return None
    port = config.metrics_port + offset
    try:
        return Exporter(importlib.import_module("prometheus_client"), config.metrics_host, port, families)
    except ModuleNotFoundError:
        if config.role != "worker" or not config.local_rank:
            logger.warning(
                "PSGC_METRICS_PORT=%d: there are no metrics, because prometheus-client is missing: %s", config.metrics_port, INSTALL
            )
    except (OSError, OverflowError) as error:
        logger.warning(
            "PSGC_METRICS_PORT=%d: this process has no metrics, because it cannot listen at %s port %d (%s); the job goes on; choose another port",
            config.metrics_port, config.metrics_host, port, getattr(error, "strerror", None) or error,
        )  # fmt: skip
    return None


def _to_opentelemetry(families: Families) -> None:
    from psgc.observe.telemetry import observe

    if why := observe(families):
        logger.warning("PSGC_METRICS_OTEL=1: OpenTelemetry gets no figures: %s", why)
