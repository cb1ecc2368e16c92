"""A planned job: the layout that its gradients get by a plan, and the file that the layout is written to (PSGC_LAYOUT_OUT)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from psgc.errors import CodecError, UsageError
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec
from psgc.layout.building import check_buckets
from psgc.plan.model.plan import UNCOMPRESSED, JobShape, Plan, plan_text, pushes
from psgc.plan.planfile.by_shape import Matched, matched
from psgc.plan.planfile.runtime import plan_of, planned_buckets
from psgc.torch.plans.choice import end_everywhere
from psgc.torch.session.run_report import run_logger
from psgc.torch.tensors.declaring import plain_name
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
TRACED_PLAN, TRACED_PROFILE, TRACED_CLUSTER = "plan.json", "profile.json", "cluster.toml"  # beside timelines


def of_model(plan: Plan, tensors: Sequence[TensorSpec], session: Session) -> Plan:
    """The plan with this model's names, if it was made from a trace, which has none, or of the model with other wrappers in it
    (``plain_name``). Where its tensors are not this model's, every rank ends with a line that names the first that does not match; a process that is alone
    raises UsageError with that line."""
    try:
        found = matched(_named_as(tensors, plan), tensors)
    except UsageError as error:
        end_everywhere(session, error, of_this_rank=False)
    if found.plan is not plan and session.rank == 0:
        run_logger.info("%s", _told(found))
    return found.plan


def _named_as(tensors: Sequence[TensorSpec], plan: Plan) -> Plan:
    own = {plain_name(tensor.name): tensor.name for tensor in tensors}
    buckets = tuple(replace(one, tensors=tuple(own.get(plain_name(name), name) for name in one.tensors)) for one in plan.buckets)
    return plan if buckets == plan.buckets else replace(plan, buckets=buckets)


def _told(found: Matched) -> str:
    said = "the plan was made from a trace: its tensors are matched with this model's by shape"
    if not found.by_order:
        return said
    traced, name = found.first
    return (
        f"{said}; {found.by_order} of them have the shape of others and are told apart by their order, the last layer's first: the first is {traced!r}, "
        f"taken to be {name!r}"
    )


def declared_buckets(plan: Plan, tensors: Sequence[TensorSpec], session: Session) -> tuple[BucketSpec, ...]:
    """The plan's buckets, for these tensors and this job. Where it is a plan for another, every rank ends with a line that names the first difference; a
    process that is alone raises UsageError with that line."""
    servers = _servers(session)
    try:
        if servers == 0:
            _refuse_servers(plan)
        buckets = planned_buckets(plan, tensors, JobShape(session.size, servers))
        check_buckets(Declaration("plan", "plan", tuple(tensors), UNCOMPRESSED, True, buckets=buckets))
        return buckets
    except (UsageError, CodecError) as error:
        end_everywhere(session, error, of_this_rank=False)


def is_of(plan: Plan, tensors: Sequence[TensorSpec]) -> bool:
    """Whether the plan is of exactly the tensors that have elements, by their names."""
    planned = sorted(name for bucket in plan.buckets for name in bucket.tensors)
    return planned == sorted(tensor.name for tensor in tensors if tensor.numel)


def _refuse_servers(plan: Plan) -> None:
    """Raise UsageError for a bucket that goes over servers."""
    for bucket in plan.buckets:
        if pushes(bucket.option):
            raise UsageError(
                f"plan: the bucket of {bucket.tensors[0]!r} goes over servers ({' '.join(bucket.option)}), but this job has none; start servers "
                f"(--servers 1), or make a plan of collectives"
            )


def _servers(session: Session) -> int | None:
    """The job's servers; None where the worker is alone and has none."""
    return None if session.size == 1 and session.config.solo else session.config.servers


def leave_for_trace(session: Session, plan: Plan | None, layout: Layout, on_gpu: bool) -> None:
    """On rank 0 of a job that is traced: write what gradients travel by into the folder of timelines, as TRACED_PLAN. plan: where there is one, with what it
    predicts; on_gpu: as in ``plan_of``. A folder that cannot be written is a warning, as it is for timelines."""
    if session.whole.rank or not session.config.trace_folder or session.config.trace_as_byteps:
        return
    written = plan if plan is not None else plan_of(layout, _servers(session), on_gpu)
    leave_file(session.config.trace_folder, TRACED_PLAN, plan_text(written.to_json()))


def leave_file(folder: str, name: str, text: str) -> None:
    path = Path(folder, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error.strerror)


def write_layout(path: str, layout: Layout, session: Session, on_gpu: bool) -> None:
    """The layout as a plan, in a file. on_gpu: as in ``plan_of``. Raises UsageError where it cannot be written."""
    try:
        Path(path).write_text(plan_text(plan_of(layout, _servers(session), on_gpu).to_json()))
    except OSError as error:
        raise UsageError(f"PSGC_LAYOUT_OUT={path}: {error.strerror}") from None
    logger.info("layout written path=%s buckets=%d", path, len(layout.buckets))
