"""What gradients travel by, as the script or the environment chose it: a codec, a rule for each parameter, a plan, or rank 0's plan.

One path for ``compression=``, ``ddp_hook(...)``, ``switch_plan(...)`` and PSGC_PLAN. A plan's file need only be where rank 0 runs: ranks that lack it
take rank 0's, and the scheduler compares what all ranks then declare, so that a rank whose own file differs ends the job for all with one line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import torch

from psgc.errors import CodecError, UsageError
from psgc.plan.model.level import SAFE, asks_auto, level_of
from psgc.plan.model.plan import UNCOMPRESSED, Plan
from psgc.plan.planfile.fits import other_inside
from psgc.plan.planfile.runtime import check_runs, load_runnable
from psgc.torch.plans.handed import hand_out, handed_out
from psgc.torch.plans.rules import Rule, codec_by_rule, rule_of
from psgc.torch.session import without_effect
from psgc.torch.tensors.byteps_options import seed_among
from psgc.torch.tensors.codec_text import check_carries, codec_text, given_text
from psgc.worker.session import Session

logger = logging.getLogger(__name__)

# Codec text, an object that has it, BytePS's options, a rule, a plan or its file; None for what the environment says.
Given: TypeAlias = str | os.PathLike[str] | Plan | Rule | Mapping[str, Any] | Any | None
SYNCHRONOUS_OR_NOT: Final = "DistributedOptimizer"  # the one call that trains asynchronously, too


@dataclass(frozen=True, slots=True)
class Choice:
    """codec: canonical text; ``none`` beside a plan or a rule. awaited: the file of a plan that this rank lacks, and takes from rank 0. auto: uncompressed at
    first, and then by what the running job finds out to be quickest, or what it has found out. quality: the level of what it may choose. rule: names the
    codec of each parameter."""

    codec: str = UNCOMPRESSED
    plan: Plan | None = None
    awaited: str = ""
    auto: bool = False
    quality: str = SAFE
    rule: Rule | None = None

    def codec_of(self, name: str, parameter: torch.Tensor) -> str:
        """Of a parameter, where no plan says. Raises CodecError and UsageError where a rule gives none."""
        return self.codec if self.rule is None else codec_by_rule(self.rule, name, parameter)

    def codecs(self, names: Mapping[torch.Tensor, str]) -> list[str]:
        """All codecs that are known so far. names: of the parameters."""
        if self.rule is not None:
            return sorted({self.codec_of(name, parameter) for parameter, name in names.items()})
        return [self.codec] if self.plan is None else sorted({bucket.codec for bucket in self.plan.buckets})

    def check(self, names: Mapping[torch.Tensor, str]) -> None:
        """Raise CodecError naming the first of these parameters that its codec cannot carry; UsageError where a rule gives no codec."""
        for parameter, name in names.items():
            check_carries(self.codec_of(name, parameter), parameter, name)


def chosen(session: Session, given: Given, by: str) -> Choice:
    """What ``given`` means in this job; None: PSGC_PLAN, else PSGC_CODEC, else uncompressed. by: the call that was given it, as users write it.
    Raises UsageError for a plan that cannot be run, or beside a codec that the script names; CodecError."""
    if session.config.async_mode and by != SYNCHRONOUS_OR_NOT:
        refuse_asynchronous(by)
    asked = session.config.plan if given is None else given
    if isinstance(asked, str) and asks_auto(asked):
        return _automatic(session, asked)
    own = named(session, given, by)
    if own is not None and own.plan is None and not own.awaited and session.config.plan:
        if own.codec != UNCOMPRESSED or own.rule is not None:
            raise UsageError(
                f"compression is {given!r}, but PSGC_PLAN={session.config.plan} names each bucket's codec; leave one of the two out"
            )
        own = _automatic(session, session.config.plan) if asks_auto(session.config.plan) else None
    if own is not None and own.auto:
        return own
    if own is None and session.config.plan:
        return _of_file(session, session.config.plan)
    if own is not None and (own.plan is not None or own.awaited or own.rule is not None):
        return own
    return Choice(codec_text(without_effect.choose(session, None if own is None else given_text(given), by), "float32"))


def refuse_asynchronous(by: str) -> NoReturn:
    """Raise UsageError for what averages gradients."""
    raise UsageError(
        f"{by} averages gradients, but PSGC_ASYNC=1 (BYTEPS_ENABLE_ASYNC) asks for asynchronous training, which DistributedOptimizer does; "
        f"use that, or unset the variable"
    )


def refuse_plan(session: Session, by: str) -> None:
    """Raise UsageError under PSGC_PLAN: for what sends momenta, by a codec of its own."""
    if session.config.plan:
        raise UsageError(f"{by} sends momenta by a codec of its own, not by PSGC_PLAN={session.config.plan}; run it without")


def _automatic(session: Session, given: str) -> Choice:
    if session.whole is not session:
        raise UsageError("auto measures whole jobs, and psgc was initialized for one dimension of a mesh; name a codec or a plan")
    return Choice(auto=session.size > 1, quality=level_of(given, session.config.quality))


def named(session: Session, given: Given, by: str) -> Choice | None:
    """What the script itself names; None where it names nothing."""
    if given is None:
        return None
    if isinstance(given, Plan):
        check_runs(given, f"{by}: the plan")
        return Choice(plan=given)
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
        return _of_file(session, os.fspath(given))
    if isinstance(given, str) and asks_auto(given):
        raise UsageError(f"{by}: 'auto' is chosen when the optimizer is made: compression=\"auto\", psgc run --plan auto or PSGC_PLAN=auto")
    rule = rule_of(given)
    if rule is None and (seed := seed_among(given)) is not None:
        without_effect.tell_seed(session, *seed)
    return Choice(codec_text(given, "float32")) if rule is None else Choice(rule=rule)


def switched(session: Session, given: Given) -> Choice:
    """What ``switch_plan`` is given. Raises UsageError where it names nothing."""
    choice = named(session, given, "switch_plan")
    if choice is None:
        raise UsageError("switch_plan: expected a plan, the path of a plan's file, or codec text; 'none' for no compression")
    return choice


def _of_file(session: Session, path: str) -> Choice:
    if session.rank and not os.path.exists(path):
        return Choice(awaited=path)
    try:
        return Choice(plan=load_runnable(path))
    except (UsageError, CodecError) as error:
        end_everywhere(session, error, of_this_rank=session.rank > 0)


def plan_for(session: Session, choice: Choice, name: str) -> Plan | None:
    """The choice's plan, here. Rank 0 hands its own out under the name, a rank that awaits one takes it. Every rank calls this, at the same place."""
    if choice.awaited:
        try:
            plan = handed_out(session, name)
            check_runs(plan, name)
        except (UsageError, CodecError) as error:
            end_everywhere(session, error, of_this_rank=True)
        return plan
    if choice.plan is not None and session.rank == 0 and session.size > 1:
        hand_out(session, name, choice.plan)
        if session.whole is session and (line := other_inside(choice.plan, session.ranks.inside)):
            logger.warning("%s", line)
    return choice.plan


def end_everywhere(session: Session, error: UsageError | CodecError, of_this_rank: bool) -> NoReturn:
    """Raise the error; in a job, end all of it with the error's line. of_this_rank: what is wrong is this rank's own, so that the line names it."""
    if session.size == 1:
        raise error
    session.fail(f"rank {session.whole.rank}: {error}" if of_this_rank else str(error))
    session.barrier()  # raises what ended the job
    raise error
