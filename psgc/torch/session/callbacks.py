"""``metrics()`` for loggers of training, each in one line. None of their libraries is needed: whoever calls has one.

Every rank has figures of its own; a script that logs on rank 0 alone logs rank 0's.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from psgc.errors import UsageError
from psgc.torch.session.metrics import numbers


def log_metrics(logger: Any, step: int | None = None) -> None:
    """Log this rank's figures: to TensorBoard's ``SummaryWriter`` (``add_scalar``), or to Weights & Biases, the module or a run (``log``). Names begin with
    ``psgc/``. Raises UsageError for another logger."""
    found = numbers()
    if hasattr(logger, "add_scalar"):
        for name, number in found.items():
            logger.add_scalar(name, number, step)
    elif hasattr(logger, "log") and not isinstance(logger, logging.Logger | logging.LoggerAdapter):  # theirs takes a level
        logger.log(found, step=step)
    else:
        raise UsageError(
            f"log_metrics: a {type(logger).__name__} has neither add_scalar, as TensorBoard's SummaryWriter, nor log, as wandb"
        )


def lightning_callback(every: int = 50) -> Any:
    """A callback for Lightning's ``Trainer(callbacks=[...])`` that gives this rank's figures to the trainer's loggers every so many steps. Raises UsageError
    where Lightning is not installed."""
    callback = _first("lightning_callback", "lightning.pytorch", "pytorch_lightning").Callback

    class LogMetrics(callback):  # type: ignore[misc, valid-type]
        logged = -1  # the step: of several batches that make one, the last is followed by the optimizer's

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step % every == 0 and trainer.global_step != self.logged:
                self.logged = trainer.global_step
                for logger in trainer.loggers:
                    logger.log_metrics(numbers(), trainer.global_step)

    return LogMetrics()


def log_with_trainer(trainer: Any) -> None:
    """Add this rank's figures to whatever a Hugging Face ``Trainer`` logs, from now on. Raises UsageError where transformers is not installed."""
    callback = _first("log_with_trainer", "transformers").TrainerCallback

    class LogMetrics(callback):  # type: ignore[misc, valid-type]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs is not None:
                logs.update(numbers())

    trainer.callback_handler.callbacks.insert(0, LogMetrics())  # before those that write what is logged


def _first(caller: str, *modules: str) -> Any:
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise UsageError(f"{caller}: {modules[0].partition('.')[0]} is not installed")
