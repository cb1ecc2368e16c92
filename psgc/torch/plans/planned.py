"""A planned job: the plan that an optimizer's gradients travel by (PSGC_PLAN), and the layout they got (PSGC_LAYOUT_OUT).

Each rank reads its own copy of the plan; the scheduler checks that all are the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from psgc.config import Config
from psgc.errors import UsageError
from psgc.layout import BucketSpec, Layout, TensorSpec
from psgc.plan.model.plan import JobShape, Plan, plan_text
from psgc.plan.planfile.runtime import load_runnable, plan_of, planned_buckets
from psgc.torch.collectives.groups import job_groups
from psgc.torch.tensors.codec_text import codec_text
from psgc.worker.session import Session

logger = logging.getLogger(__name__)


def configured_plan(config: Config, compression: str | None) -> Plan | None:
    """The plan that the job was started with. Raises UsageError for one that cannot be run, or beside a codec that the script names."""
    if not config.plan:
        return None
    if codec_text(compression, "float32") != "none":
        raise UsageError(f"compression is {compression!r}, but PSGC_PLAN={config.plan} names each bucket's codec; leave one of the two out")
    return load_runnable(config.plan)


def declared_buckets(plan: Plan, tensors: Sequence[TensorSpec], session: Session) -> tuple[BucketSpec, ...]:
    """The plan's buckets, for these tensors and this job, whose session can then run them. Raises UsageError, naming the first difference, where it is a
    plan for another."""
    session.groups_of = functools.partial(job_groups, session)
    return planned_buckets(plan, tensors, JobShape(session.size, _servers(session)))


def _servers(session: Session) -> int | None:
    """The job's servers; None where the worker is alone and has none."""
    return None if session.size == 1 and session.config.solo else session.config.servers


def write_layout(path: str, layout: Layout, session: Session) -> None:
    """The layout as a plan, in a file. Raises UsageError where it cannot be written."""
    try:
        Path(path).write_text(plan_text(plan_of(layout, _servers(session)).to_json()))
    except OSError as error:
        raise UsageError(f"PSGC_LAYOUT_OUT={path}: {error.strerror}") from None
    logger.info("layout written path=%s buckets=%d", path, len(layout.buckets))
