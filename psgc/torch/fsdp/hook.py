"""``fsdp_hook``: models that torch's FSDP2 has sharded within a node, with psgc in place of the all-reduce between the nodes of HSDP.

Owns the registration and its checks; ``gradients`` synchronizes. FSDP itself gathers parameters and sums gradients within a node, as it always does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from psgc.errors import UsageError
from psgc.plan.model.plan import Plan
from psgc.torch.ddp import amp
from psgc.torch.ddp.models import check_world
from psgc.torch.fsdp.gradients import FsdpGradients
from psgc.torch.fsdp.planned import Way, ways_of
from psgc.torch.fsdp.units import parted, replicas_of, units_of
from psgc.torch.gradients.linearity import CodecAdvice
from psgc.torch.plans.choice import Choice, Given, chosen, plan_for, switched
from psgc.torch.session import api
from psgc.torch.session.backup import refuse_backup
from psgc.torch.session.replaceable import refuse_replaceable


def fsdp_hook(model: torch.nn.Module, codec_or_rule: Given = None) -> FsdpHook:
    """Average the gradients of a model that FSDP2 has sharded within each node between the nodes, through psgc. Joins the job if this process has not.

        mesh = init_device_mesh("cuda", (nodes, ranks_of_a_node), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        psgc.fsdp_hook(model, "int8")

    Then train as ever. Without a codec, gradients are those that FSDP averages on ``mesh`` (HSDP) without psgc; ``mesh["shard"]`` does
    as well. Every rank must call it, after fully_shard. In a job that ``init(mesh=..., dim=...)`` has parted, replicas are the ranks along that dimension; so
    it must be where a model is cut otherwise, too (tensor or pipeline parallelism). Else all groups of ranks that shard the model are.

    codec_or_rule: codec text (``"int8"``, ``"topk:k=0.01"``, ``"onebit/int8"``); a function that names the codec of a module that was sharded, by its name
                   in the model and its first parameter; or a plan of the model's parameters or its file, of which each module takes what most of its
                   elements have. None: PSGC_PLAN's plan, else PSGC_CODEC, else uncompressed.
    Raises CodecError for an unknown codec; UsageError for a model that is not so sharded; ConfigError where torch.distributed's ranks are not those of psgc's
    job.
    """
    return FsdpHook(model, codec_or_rule)


class FsdpHook:
    """See ``fsdp_hook``."""

    def __init__(self, model: torch.nn.Module, codec_or_rule: Given = None) -> None:
        units = units_of(model)
        api.init()
        session = self._session = api.current_session()
        refuse_replaceable(session, "fsdp_hook")
        refuse_backup(session, "fsdp_hook")
        check_world(session)
        given = _without_auto(chosen(session, codec_or_rule, "fsdp_hook"))
        if session.config.profile:
            raise UsageError("PSGC_PROFILE times DistributedOptimizer, not FSDP; unset it")
        replicas = replicas_of(units, session)
        units, elsewhere = parted(units, replicas, session)
        amp.install()
        number = api.next_number(session, "fsdp")
        self._units, self._switches = units, 0
        choice, ways = self._planned(given, f"plan of fsdp{number}")
        self._gradients = FsdpGradients(session, number, choice, units, replicas, ways)
        self._gradients.advice = CodecAdvice()
        for index, unit in enumerate(units):
            unit.take_over()
            unit.hook(partial(self._gradients.take, index))
        for unit in elsewhere:
            unit.hook(unit.refuse)

    def residual_state_dict(self) -> dict[str, Any]:
        """What codecs keep on this rank, and this rank's share of what they keep on the servers, to be saved with torch.save: a file for each rank. Call it
        between two steps, on every rank."""
        return self._gradients.state()

    def load_residual_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``residual_state_dict()``: this rank's own in a job with the same mesh, bit for bit; or a list of all ranks', where there are other
        shards or nodes now: then the mean of what is kept stays what it was, and PowerSGD's Q begins anew. Call it on every rank, between two steps. Raises
        UsageError for what does not fit."""
        self._gradients.go_on(states)

    def needed_of_mesh(self, mesh: Sequence[Sequence[int]]) -> tuple[set[int], set[int]] | None:
        """Whose states ``load_residual_state_dict`` reads from a job with this mesh: the ranks' own, and the servers'. None: this rank's alone, whole."""
        return self._gradients.needed_of(tuple(map(tuple, mesh)))

    def _planned(self, choice: Choice, name: str) -> tuple[Choice, dict[str, Way]]:
        """The choice, or what a plan says of each unit. name: by which rank 0 hands a plan out. Every rank must call it. Raises UsageError for a plan that does
        not fit."""
        plan = plan_for(self._session, choice, name)
        if plan is None:
            return choice, {}
        pieces = {unit.name: [(parameter, math.prod(shape)) for parameter, shape in unit.pieces] for unit in self._units if unit.pieces}
        return Choice(), ways_of(plan, pieces, self._session.config.servers)

    def switch_plan(self, plan: str | os.PathLike[str] | Plan) -> None:
        """From the next step on, gradients travel by this plan, its file (of which rank 0's is enough) or a codec's text; what codecs keep goes along. Call it
        on every rank between the same two steps: after step(), before the next backward(). Raises UsageError in the middle of a step, and for a plan that
        does not fit; CodecError."""
        self._switches += 1
        name = f"plan {self._switches} of {self._gradients.exchange.name}"
        self._gradients.switch_to(*self._planned(_without_auto(switched(self._session, plan)), name))

    def put_back(self) -> None:
        """Put averaged gradients off, in place of the optimizer's step(): they go back into the residuals of codecs with error feedback, and come with later
        steps; p.grad is cleared. Call it on every rank. Raises UsageError if none wait for a step."""
        self._gradients.put_back()
        self._gradients.parameters.clear()

    def statistics(self) -> dict[str, int]:
        """Counter: steps. ``current_session().statistics()`` has what travelled."""
        return {"steps": self._gradients.steps}


def _without_auto(choice: Choice) -> Choice:
    """Raise UsageError for ``auto``, which measures whole gradients."""
    if choice.auto:
        raise UsageError(
            "fsdp_hook takes a codec, a function that names one for each module, or a plan; auto measures whole gradients, not shards"
        )
    return choice
