"""``psgc.torch.metrics()`` and the loggers that get it: stand-ins in place of their libraries."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import psgc.torch as psgc
from psgc.errors import UsageError
from psgc.observe.table import FIGURES
from psgc.torch.session import metrics as module
from psgc.wire.reports import Report

REPORT = Report(10_000, 5_000_000, 40, 25_000, codecs={"int8": [900, 3_600, 3]}, residuals={"optimizer0/0 w": 0.5}, travels="as it does")


@pytest.fixture(autouse=True)
def a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_session", lambda: SimpleNamespace(report=lambda: REPORT))


def test_a_script_has_the_figures_of_the_table() -> None:
    found = psgc.metrics()
    assert found.keys() == {each.name for each in FIGURES if each.is_of("worker")}
    assert (found["steps"], found["step_ms"], found["codec_bytes"], found["travels"]) == (40, 25.0, {"int8": 900}, "as it does")


def test_a_process_that_is_alone_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_session", lambda: SimpleNamespace(report=lambda: None))
    assert psgc.metrics() == {}


def test_scalars_reach_tensorboard_and_wandb() -> None:
    scalars: dict[str, tuple[float, int]] = {}
    psgc.log_metrics(SimpleNamespace(add_scalar=lambda name, value, step: scalars.update({name: (value, step)})), 7)
    assert scalars["psgc/step_ms"] == (25.0, 7)
    assert scalars["psgc/codec_bytes/int8"] == (900, 7)
    assert "psgc/travels" not in scalars
    logged: list[Any] = []
    psgc.log_metrics(SimpleNamespace(log=lambda values, step: logged.append((values, step))), 8)
    assert logged == [({name: value for name, (value, _) in scalars.items()}, 8)]
    with pytest.raises(UsageError, match="a dict has neither add_scalar"):
        psgc.log_metrics({})
    with pytest.raises(UsageError, match="a Logger has neither add_scalar"):
        psgc.log_metrics(logging.getLogger("training"))


def test_lightning_logs_them_every_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("lightning.pytorch")
    library.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", library)
    callback, steps = psgc.lightning_callback(every=10), []
    assert isinstance(callback, library.Callback)
    logger = SimpleNamespace(log_metrics=lambda values, step: steps.append((values["psgc/steps"], step)))
    for batch in range(2, 61):  # two make a step
        callback.on_train_batch_end(SimpleNamespace(global_step=batch // 2, loggers=[logger]), None, None, None, batch)
    assert steps == [(40, 10), (40, 20), (40, 30)]


def test_the_trainer_logs_them_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("transformers")
    library.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", library)
    writes = object()
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[writes]))
    psgc.log_with_trainer(trainer)
    first, second = trainer.callback_handler.callbacks
    assert second is writes, "who writes what is logged comes after"
    logs = {"loss": 1.0}
    first.on_log(None, None, None, logs=logs)
    assert logs == {"loss": 1.0} | module.numbers()
    first.on_log(None, None, None)


def test_without_the_library_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="lightning_callback: lightning is not installed"):
        psgc.lightning_callback()
    with pytest.raises(UsageError, match="transformers is not installed"):
        psgc.log_with_trainer(object())
