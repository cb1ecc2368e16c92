"""The same figures for OpenTelemetry: instruments that are asked for their values when its SDK reads them.

A process whose script has set up OpenTelemetry's metrics keeps that; else its SDK is set up to send by OTLP, where the OTEL_EXPORTER_OTLP_* variables say.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from psgc.observe.table import Family

Families = Callable[[], Iterable[Family]]


def observe(families: Families) -> str:
    """Make an instrument for each figure, once there are any. Returns why that could not be done; "" where it was."""
    try:
        metrics = importlib.import_module("opentelemetry.metrics")
    except ModuleNotFoundError:
        return "opentelemetry-api is missing: pip install opentelemetry-sdk opentelemetry-exporter-otlp"
    if "Proxy" in type(metrics.get_meter_provider()).__name__:
        try:
            sdk = importlib.import_module("opentelemetry.sdk.metrics")
            export = importlib.import_module("opentelemetry.sdk.metrics.export")
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        except ModuleNotFoundError as error:
            return f"nothing has set up its metrics, and {error.name} is missing: pip install opentelemetry-sdk opentelemetry-exporter-otlp"
        metrics.set_meter_provider(sdk.MeterProvider([export.PeriodicExportingMetricReader(otlp.OTLPMetricExporter())]))
    meter = metrics.get_meter("psgc")
    while not (known := list(families())):  # the scheduler has not answered yet
        time.sleep(1.0)
    for family in known:
        make = meter.create_observable_counter if family.counts else meter.create_observable_gauge
        make(f"psgc.{family.name.removesuffix('_total')}", [_values(metrics, families, family.name)], description=family.meaning)
    return ""


def _values(metrics: Any, families: Families, name: str) -> Callable[[Any], list[Any]]:
    def read(_: Any) -> list[Any]:
        return [
            metrics.Observation(value, dict(zip(family.labels, labels, strict=True)))
            for family in families()
            if family.name == name
            for labels, value in family.values
        ]

    return read
