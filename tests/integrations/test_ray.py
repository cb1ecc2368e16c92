"""Jobs on Ray: a real cluster of three raylets of this machine, each of which has one CPU, so that each worker and each server is on a node of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import psgc.torch
from psgc.errors import JobFailed, PsgcError, UsageError
from psgc.launch.on_ray.launching import _await
from psgc.launch.on_ray.placing import Found, lacking, seats

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
LIMITS = {"PSGC_HEARTBEAT_S": "0.3", "PSGC_SILENCE_S": "1", "PSGC_ABORT_GRACE_S": "2", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Connected to a cluster of its own."""
    found = pytest.importorskip("ray", reason="Ray is not installed: pip install 'psgc[ray]'")
    from ray.cluster_utils import Cluster

    found.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cluster = Cluster()
    for _ in range(3):
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    found.init(address=cluster.address, log_to_driver=False)
    yield found
    found.shutdown()
    cluster.shutdown()


def digits(out: str) -> None:
    import runpy
    import sys

    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["train_digits.py", "--steps", "30", "--codec", "int8", "--out", out]
    runpy.run_path(str(EXAMPLES / "train_digits.py"), run_name="__main__")


def summing(steps: int, failing: int = -1, killed: int = -1) -> tuple[int, int]:
    import torch

    psgc.torch.init()
    for step in range(steps):
        total = psgc.torch.push_pull(torch.full((1000,), psgc.torch.rank() + 1.0), name="x", average=False)
        assert total.eq(sum(range(1, psgc.torch.size() + 1))).all()
        if step == 3 and psgc.torch.rank() == failing:
            raise ValueError("bad batch")
        if step == 3 and psgc.torch.rank() == killed:
            os.kill(os.getpid(), signal.SIGKILL)
    return psgc.torch.rank(), psgc.torch.size()


def await_all_free(ray: Any) -> None:
    """Ray tells of what is free again with a delay."""
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU") != 3:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)


def record(path: Path) -> Any:
    return {name: value for name, value in json.loads(path.read_text()).items() if name in ("losses", "validation_loss", "accuracy")}


def as_psgc_run(out: Path, nodes: str) -> Any:
    """The digits' losses on so many simulated nodes."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(("PSGC_", "DMLC_", "BYTEPS_"))}
    job = [sys.executable, str(EXAMPLES / "train_digits.py"), "--steps", "30", "--codec", "int8", "--out", str(out)]
    command = [sys.executable, "-m", "psgc.launch", "run", "--nodes", nodes, "--", *job]
    subprocess.run(command, env={**env, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    return record(out)


@pytest.mark.integrations
def test_two_raylets_train_the_digits_to_the_losses_of_psgc_run_bit_for_bit(ray: Any, tmp_path: Path) -> None:
    import psgc.ray

    assert psgc.ray.launch(digits, workers=2, servers=1, args=(str(tmp_path / "ray.json"),), env=LIMITS) == [None, None]
    assert record(tmp_path / "ray.json") == as_psgc_run(tmp_path / "run.json", "2") != {}
    await_all_free(ray)


@pytest.mark.integrations
@pytest.mark.parametrize(("workers", "servers"), [(3, 0), (2, 1)])
def test_results_come_in_the_order_of_ranks_and_nothing_is_left(ray: Any, workers: int, servers: int) -> None:
    import psgc.ray

    found = psgc.ray.launch(summing, workers=workers, servers=servers, args=(5,), env=LIMITS)
    assert found == [(rank, workers) for rank in range(workers)]
    await_all_free(ray)


@pytest.mark.integrations
def test_without_a_number_of_servers_there_has_to_be_room_for_one_on_each_node_with_workers(ray: Any) -> None:
    """The three workers fit on one of the nodes; three servers would need all of them."""
    import psgc.ray

    assert psgc.ray.launch(summing, workers=3, resources={"CPU": 0.3}, args=(5,), env=LIMITS) == [(rank, 3) for rank in range(3)]
    await_all_free(ray)


@pytest.mark.integrations
def test_what_a_rank_raises_is_raised_as_ray_get_does_and_ends_the_others(ray: Any) -> None:
    import psgc.ray

    with pytest.raises(ValueError, match="bad batch") as found:
        psgc.ray.launch(summing, workers=2, servers=1, args=(10**6,), kwargs={"failing": 1}, env=LIMITS)
    assert isinstance(found.value, ray.exceptions.RayTaskError)
    await_all_free(ray)


@pytest.mark.integrations
def test_a_worker_that_dies_is_rays_error_and_ends_the_others(ray: Any) -> None:
    import psgc.ray

    with pytest.raises(ray.exceptions.RayActorError):
        psgc.ray.launch(summing, workers=2, servers=1, args=(10**6,), kwargs={"killed": 0}, env=LIMITS)
    await_all_free(ray)


def told_pid(folder: str) -> None:
    """Trains for ever, and has told its process and its raylet."""
    psgc.torch.init()
    (Path(folder) / f"rank{psgc.torch.rank()}").write_text(f"{os.getpid()} {os.getppid()}")
    import torch

    while True:
        psgc.torch.push_pull(torch.ones(1000), name="x")
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_amid(folder: Path, victim: str, cluster: str) -> list[int]:
    """Once both ranks train: kill -9 rank 1, the server's actor or rank 1's raylet. Returns the processes of all that may not be left. cluster: its address."""
    deadline = time.monotonic() + 200
    ranks = [folder / "rank0", folder / "rank1"]
    while not all(path.exists() and len(path.read_text().split()) == 2 for path in ranks):
        assert time.monotonic() < deadline, "the ranks have not begun"
        time.sleep(0.05)
    (first, _), (second, raylet) = (map(int, path.read_text().split()) for path in ranks)
    serving = actors("ray::Service.serve", cluster)
    os.kill({"worker": second, "raylet": raylet, "service": serving[-1]}[victim], signal.SIGKILL)
    return [first, second, *serving]


def actors(title: str, cluster: str) -> list[int]:
    """Processes of that title of this cluster's raylets: another test's cluster may run at the same time."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes().startswith(title.encode()):
                    raylet = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                    if f"--gcs-address={cluster}".encode() in Path(f"/proc/{raylet}/cmdline").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


@pytest.mark.integrations
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", ["worker", "service", "raylet"])
def test_a_process_that_is_killed_from_outside_ends_the_job_and_nothing_of_it_is_left(tmp_path: Path, victim: str) -> None:
    """On a cluster of its own, which a raylet's death leaves with a node less. A worker's death and a raylet's are Ray's errors, a server's is one line."""
    found = pytest.importorskip("ray", reason="Ray is not installed: pip install 'psgc[ray]'")
    from ray.cluster_utils import Cluster

    import psgc.ray

    if found.is_initialized():
        found.shutdown()
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, object_store_memory=80 << 20)  # the driver's; the job's nodes are others
        for _ in range(3):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        found.init(address=cluster.address, log_to_driver=False)
        found.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(kill_amid, tmp_path, victim, cluster.address)
            with pytest.raises((found.exceptions.RayActorError, PsgcError)) as caught:
                psgc.ray.launch(told_pid, workers=2, servers=1, args=(str(tmp_path),), env=LIMITS)
            processes = killing.result()
        assert isinstance(caught.value, PsgcError) == (victim == "service"), caught.value
        if victim == "service":
            assert "\n" not in str(caught.value)
        deadline = time.monotonic() + 100
        while any(map(lives, processes)):
            assert time.monotonic() < deadline, [pid for pid in processes if lives(pid)]
            time.sleep(0.1)
    finally:
        found.shutdown()
        cluster.shutdown()


@pytest.mark.integrations
def test_a_cluster_without_room_is_a_line_within_the_limit(ray: Any) -> None:
    import psgc.ray

    await_all_free(ray)
    for asked, said in (
        ({"CPU": 1}, "it lacks 5 CPU (3 free)"),
        ({"CPU": 1, "GPU": 1}, "it lacks 5 CPU (3 free), 4 GPU (0 free)"),
        ({"CPU": 1.4}, "CPU"),
    ):
        workers = 2 if asked["CPU"] > 1 else 4
        with pytest.raises(psgc.ray.PlacementError, match=r"has no room for \d worker\(s\).* within 0\.5 s") as found:
            psgc.ray.launch(summing, workers=workers, servers=workers // 4, resources=asked, args=(1,), placement_timeout_s=0.5)
        assert said in str(found.value) or "no placement of these bundles (PACK) fits" in str(found.value)
        assert "\n" not in str(found.value)
    await_all_free(ray)


@pytest.mark.integrations
def test_wrong_settings_are_told_before_anything_starts(ray: Any) -> None:
    import psgc.ray

    with pytest.raises(PsgcError, match="PSGC_PART_BYTES"):
        psgc.ray.launch(summing, workers=2, env={"PSGC_PART_BYTES": "many"})
    with pytest.raises(UsageError, match="workers=0"):
        psgc.ray.launch(summing, workers=0)


@pytest.mark.integrations
def test_ray_train_with_psgcs_config_trains_the_digits_bit_for_bit_as_psgc_run(ray: Any, tmp_path: Path) -> None:
    """Ray Train takes raylets of one address for one node."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    import psgc.ray

    trainer = TorchTrainer(
        lambda settings: digits(settings["out"]), train_loop_config={"out": str(tmp_path / "ray.json")}, scaling_config=ScalingConfig(num_workers=2),
        torch_config=psgc.ray.Config(servers=1, settings=LIMITS), run_config=RunConfig(storage_path=str(tmp_path)),
    )  # fmt: skip
    trainer.fit()
    assert record(tmp_path / "ray.json") == as_psgc_run(tmp_path / "run.json", "1") != {}


def test_ranks_are_numbered_node_by_node_and_share_their_nodes_gpus() -> None:
    found = [Found("a", "10.0.0.1", ("1",)), Found("b", "10.0.0.2", ("0",)), Found("a", "10.0.0.1", ("0",))]
    seated = seats(found, {"DMLC_NUM_SERVER": "1"})
    assert [seat.worker for seat in seated] == [0, 2, 1]
    assert [seat.env["CUDA_VISIBLE_DEVICES"] for seat in seated] == ["1,0", "1,0", "0"]
    assert [(seat.env["RANK"], seat.env["LOCAL_RANK"], seat.env["DMLC_WORKER_ID"]) for seat in seated] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
        ("2", "0", "1"),
    ]
    assert {(seat.env["DMLC_NUM_WORKER"], seat.env["PSGC_NODE_SIZES"]) for seat in seated} == {("2", "2,1")}


def test_what_a_cluster_lacks_is_named() -> None:
    assert lacking({"CPU": 4, "GPU": 2}, {"CPU": 8, "GPU": 1}) == "2 GPU (1 free)"
    assert lacking({"CPU": 4}, {"CPU": 8}) == ""


class Refs:
    """What _await needs of Ray: errors come in the order given, then results, unless the others hang."""

    def __init__(self, errors: dict[str, BaseException], hang: bool) -> None:
        self.errors, self.hang = errors, hang

    def wait(self, pending: list[str], num_returns: int, timeout: float | None) -> tuple[list[str], list[str]]:
        if self.hang and not self.errors.keys() & set(pending):
            return [], pending
        done = min(pending, key=lambda ref: list(self.errors).index(ref) if ref in self.errors else len(self.errors))
        return [done], [ref for ref in pending if ref != done]

    def get(self, ref: str) -> int:
        if ref in self.errors:
            raise self.errors[ref]
        return 0


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ({"server": PsgcError("gone"), "1": JobFailed("rank 0 ended"), "0": ValueError("bad batch")}, "bad batch"),
        ({"server": PsgcError("gone"), "1": JobFailed("server 0 is gone")}, "server 0 is gone"),
        ({"server": PsgcError("gone")}, "server 0 died: gone"),  # and the ranks hang
    ],
)
def test_the_first_cause_is_raised_whatever_is_heard_first(
    errors: dict[str, BaseException], raised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psgc.launch.on_ray.launching.OWN_END_S", 0.05)
    with pytest.raises((ValueError, PsgcError), match=raised):
        _await(Refs(errors, hang=True), ["0", "1"], {"server": "server 0"})


def test_results_that_all_ranks_have_are_returned_however_a_server_ends() -> None:
    assert _await(Refs({"server": PsgcError("gone")}, hang=False), ["0", "1"], {"server": "server 0"}) == [0, 0]
