"""A worker of a real job on nodes with roots or switches: buckets by options that sum within nodes first, without loss, each held against the exact mean.
Run by test_inside.py."""

from __future__ import annotations

import functools

from job_options import layout_of, step_of

import psgc.torch as psgc
from psgc.plan.model.options import all_options, server_options
from psgc.torch.collectives.groups import job_groups
from psgc.torch.session.api import current_session

NUMEL, PARTS, STEPS = 5003, 2, 2


def main() -> None:
    psgc.init()
    session = current_session()
    session.groups_of = functools.partial(job_groups, session)
    hierarchical = [option for option in all_options(("cpu",)) if any(action.startswith("intra.") for action in option)][::9]
    behind = [option for option in server_options(("cpu",)) if any(action.startswith("intra.") for action in option)]
    layout = layout_of(session, "inside", NUMEL, PARTS, [("none", option) for option in (*hierarchical, *behind)])
    for step in range(STEPS):
        for bucket, (found, mean) in zip(layout.buckets, step_of(session, layout, step, NUMEL), strict=True):
            assert (found == mean).all(), f"{bucket.option}: {found}, expected {mean}"
    pushed = sum(session.rank in (key.contributors or range(session.size)) for bucket in layout.buckets for key in bucket.keys)
    print(f"rank {session.rank}: {len(layout.buckets)} buckets are exact, {pushed} keys pushed", flush=True)
    psgc.barrier()
    psgc.shutdown()


if __name__ == "__main__":
    main()
