"""psgc among the ranks of one dimension of a device mesh. Real processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("dim", ["replicate", "shard"])
@pytest.mark.parametrize("servers", [1, 0])
def test_each_group_of_a_dimension_trains_by_itself_to_the_bit(make_job: Callable[..., Any], servers: int, dim: str) -> None:
    texts = make_job(nodes=4, servers=servers).said("--dim", dim, job="mesh.py", PSGC_MIN_COMPRESS_BYTES="0")
    groups = ["[0, 2]", "[1, 3]", "[0, 2]", "[1, 3]"] if dim == "replicate" else ["[0, 1]", "[0, 1]", "[2, 3]", "[2, 3]"]
    for text, group in zip(texts, groups, strict=True):
        assert f"all right in {group}" in text
    first = [{"0"}, {"1"}, set(), set()] if dim == "replicate" else [{"0"}, set(), {"2"}, set()]
    assert [set(re.findall(r"rank (\d) waited", text)) for text in texts] == first, "each group's first reports, by its rank in the job"


def test_what_cannot_be_is_told_in_a_line(make_job: Callable[..., Any]) -> None:
    texts = make_job(nodes=4, servers=1).said(job="mesh_refused.py")
    for text in texts:
        told = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        assert "init(mesh=...): expected a DeviceMesh of torch.distributed, got a str" in told["no mesh"]
        assert "the mesh has 2 dimensions; say which one psgc carries, as in dim='replicate'" in told["no dim"]
        assert "dim is 'replicat'; the mesh's dimensions have 'replicate', 'shard'" in told["misspelt"]
        assert "the mesh has 2 ranks and the job 4" in told["part"]
        assert "this process has joined its job before" in told["late"]
        assert "auto measures whole jobs" in told["auto"]
        assert "psgc was initialized for one dimension of a mesh, whose ranks are fixed" in told["suspend"]
        assert (
            "DistributedDataParallel averages over ranks" in told["another group"]
            and "process_group=mesh.get_group(dim)" in told["another group"]
        )
        whats = {
            "broadcast": "broadcast of 'weight'", "state": "broadcast of the optimizer's state, tensor ", "push_pull": "push_pull of 'weight'",
            "push_pull_inplace": "push_pull of 'weight'", "group": "push_pull_group of 'weights', tensor 0", "reduce": "reduce of 'weight', tensor 0",
            "held": "tensor 'weight'",
        }  # fmt: skip
        for call, what in whats.items():
            assert told[call].startswith(what) and "it is a DTensor, of which this rank has a piece; give tensor.to_local()" in told[call]


def test_the_jobs_last_line_names_the_jobs_rank_and_files_are_its_rank_0s(make_job: Callable[..., Any], tmp_path: Path) -> None:
    job = make_job(nodes=4, servers=1)
    layout, profile = tmp_path / "layout.json", tmp_path / "profile.json"
    workers = job.whole(job="mesh_ends.py", PSGC_LAYOUT_OUT=str(layout), PSGC_PROFILE=str(profile), PSGC_PROFILE_ITERATIONS="3")
    statuses = job.end()
    assert all(statuses[f"worker {rank}"] for rank in range(4)), job.text()
    assert "out of data on rank 3 of the job" in workers[3].text, job.text()
    for worker in workers[:3]:
        assert "rank 3 ended with ValueError: out of data on rank 3 of the job" in worker.text, job.text()
        assert "rank 1 ended" not in worker.text
    for path in (layout, profile):
        assert "first.weight" in path.read_text(), "the group that has the job's rank 0"
        assert "second.weight" not in path.read_text()


def test_the_example_trains_as_torchs_own(make_job: Callable[..., Any]) -> None:
    """examples/mesh_tensor_parallel.py: uncompressed it prints the losses that it has with torch's all-reduce between replicas."""
    found = make_job(nodes=4, servers=1).said("--compare", job="../../examples/mesh_tensor_parallel.py")
    for text in found:
        (psgc,), (native,) = ([line.split(": ")[1] for line in text.splitlines() if f"{by}'s losses" in line] for by in ("psgc", "torch"))
        assert psgc == native
