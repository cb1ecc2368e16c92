"""Buckets of some of a job's ranks: they are exchanged, summed and kept as in a job of these ranks alone. Real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

CODECS = ("none", "onebit/bf16", "topk:k=0.05")  # the same bits whatever a rank's number: they draw nothing


def digests(job: Any, *arguments: str, **env: str) -> list[list[str]]:
    """By worker."""
    found = []
    for text in job.said(*arguments, job="members.py", **env):
        found.append([line for line in text.splitlines() if "] " in line and line.split()[0] in CODECS])
    return found


@pytest.mark.parametrize(
    ("servers", "transport", "options"),
    [
        (2, "tcp", ["", "comp@cpu flat.push.c flat.pull.c decomp@cpu"]),
        (0, "shm", ["", "comp@cpu flat.all_gather.c decomp@cpu"]),
        (0, "tcp", [""]),
    ],
)
def test_a_bucket_of_some_ranks_holds_what_a_job_of_these_ranks_alone_would_give_them(
    make_job: Callable[..., Any], servers: int, transport: str, options: list[str]
) -> None:
    """Steps with a rank that skips, a NaN, and one that was not applied are among them."""
    arguments = ("--codecs", *CODECS, "--options", *options)
    alone = digests(make_job(nodes=2, servers=servers), *arguments, PSGC_TRANSPORT=transport)
    assert len(alone[0]) == len(CODECS) * len(options)
    assert alone[0] == alone[1]
    of_four = digests(make_job(nodes=4, servers=servers), "--groups", "2", *arguments, PSGC_TRANSPORT=transport)
    assert of_four == [alone[0]] * 4
