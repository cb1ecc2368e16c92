"""Who observes an exchange's steps, as the job asks for it: a profile and a verification the first optimizer's, ``auto`` those that it
chooses for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from psgc.errors import UsageError
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.layouts import FIRST
from psgc.torch.gradients.profiler import JobObserver


def observe(exchange: GradientExchange[Any], parameters: Iterable[torch.Tensor]) -> None:
    """From now on whoever the job asks for observes the exchange. parameters: its own. Raises UsageError where both are asked for; ConfigError where a profile
    cannot be written."""
    if exchange.session.config.profile and exchange.name == FIRST[0]:
        if exchange.choice.auto:
            raise UsageError(
                'PSGC_PROFILE times computation alone, which PSGC_PLAN=auto (compression="auto") does not leave alone; choose one'
            )
        exchange.observer = JobObserver(exchange, next(iter(parameters)))
    elif exchange.session.config.verify and exchange.name in FIRST:
        if exchange.choice.auto:
            raise UsageError(
                'PSGC_VERIFY measures a plan or a codec, but PSGC_PLAN=auto (compression="auto") chooses by itself; choose one'
            )
        if exchange.choice.rule is not None:
            raise UsageError(
                "PSGC_VERIFY measures a plan or a codec, but the script names each parameter's by a rule; leave one of them out"
            )
        from psgc.torch.auto.verifying import Verifier

        exchange.observer = Verifier(exchange, next(iter(parameters)))
    elif exchange.choice.auto:
        from psgc.torch.auto.auto_plan import AutoPlan  # which loads the planner

        exchange.observer = AutoPlan(exchange, next(iter(parameters)))
