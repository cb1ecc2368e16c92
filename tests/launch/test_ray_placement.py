"""Which bundles psgc.ray.launch asks Ray for, on a cluster that is counted here: nothing runs, and each call of an actor has its answer at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from psgc.launch.on_ray import launching
from psgc.launch.on_ray.launching import PlacementError, launch


class Cluster:
    """Nodes with CPUs. asked: the bundles of each group and its strategy. started: kind, group and bundle of each actor."""

    def __init__(self, *cpus: float) -> None:
        self.free = list(cpus)
        self.asked, self.started, self.killed, self.removed = [], [], [], []  # type: ignore[var-annotated]
        self.environments: list[dict[str, str]] = []
        self.util = SimpleNamespace(placement_group=self._group, remove_placement_group=self.removed.append)

    def is_initialized(self) -> bool:
        return True

    def available_resources(self) -> dict[str, float]:
        return {"CPU": sum(self.free)}

    def _group(self, bundles: Sequence[dict[str, float]], strategy: str) -> Any:
        """Bundles go to the first node that has room, or, spread, to the one that has most."""
        before, at = list(self.free), []
        for bundle in bundles:
            order = sorted(range(len(self.free)), key=lambda node: -self.free[node] if strategy == "SPREAD" else node)
            node = next((node for node in order if self.free[node] >= bundle["CPU"]), -1)
            at.append(node)
            self.free[node] -= bundle["CPU"]
        if fits := -1 not in at:
            self.asked.append((len(bundles), strategy))
        else:
            self.free = before
        return SimpleNamespace(number=len(self.asked) - 1, nodes=at, wait=lambda _: fits)

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: self._start(kind, options["scheduling_strategy"])))

    def _start(self, kind: type, where: tuple[Any, int]) -> Any:
        group, bundle = where
        self.started.append((kind.__name__, group.number, bundle))
        node = group.nodes[bundle]
        answers = {"place": (f"node{node}", f"10.0.0.{node + 1}", ()), "listen": 9000, "free_port": 9001}

        def call(name: str, *arguments: Any) -> Any:
            if name in ("serve", "run"):
                self.environments.append(arguments[name == "serve"])
            return Ref(answers.get(name, 0))

        names = ("place", "listen", "free_port", "serve", "run")
        return SimpleNamespace(**{name: SimpleNamespace(remote=lambda *arguments, name=name: call(name, *arguments)) for name in names})

    def get(self, asked: Any) -> Any:
        return [ref.answer for ref in asked] if isinstance(asked, list) else asked.answer

    def wait(self, pending: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return pending[-1:], pending[:-1]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class Ref:
    """To an answer that is there."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


def placed_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (group, placement_group_bundle_index)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(launching, "_ray", lambda: cluster)
    return launch(int, **options)


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize(("cpus", "servers"), [((6,), 1), ((5,), 1), ((2, 2, 2), 2), ((3, 3), 2)])
def test_without_a_number_of_servers_there_is_one_for_each_node_that_workers_are_on(
    cpus: tuple[float, ...], servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(*cpus)
    assert placed_on(cluster, monkeypatch, workers=4) == [0] * 4
    assert cluster.asked == [(4, "PACK"), (servers, "SPREAD")]
    assert cluster.started == [
        *(("Worker", 0, number) for number in range(4)), ("Service", 0, 0), *(("Service", 1, number) for number in range(servers)),
    ]  # fmt: skip
    assert {env["DMLC_NUM_SERVER"] for env in cluster.environments} == {str(servers)}
    assert len(cluster.killed) == 5 + servers and len(cluster.removed) == 2, "nothing is left"


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("servers", [0, 2])
def test_servers_that_are_asked_for_are_placed_with_the_workers_or_not_at_all(servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(4, 4)
    placed_on(cluster, monkeypatch, workers=4, servers=servers, strategy="SPREAD")
    assert cluster.asked == [(4 + servers, "SPREAD")]
    assert cluster.started[5:] == [("Service", 0, 4 + number) for number in range(servers)]


@pytest.mark.usefixtures("clean_environment")
def test_no_room_for_servers_beside_the_workers_is_a_line_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(4)
    said = r"no room for 1 server\(s\) of \{'CPU': 1\} beside 4 worker\(s\) of \{'CPU': 1\} within 60 s .*: it lacks 1 CPU \(0 free\)"
    with pytest.raises(PlacementError, match=said):
        placed_on(cluster, monkeypatch, workers=4)
    assert (len(cluster.killed), len(cluster.removed)) == (4, 2)
    with pytest.raises(PlacementError, match=r"no room for 4 worker\(s\) of \{'CPU': 1\} and 1 server\(s\) of"):
        placed_on(Cluster(4), monkeypatch, workers=4, servers=1)
    with pytest.raises(PlacementError, match="STRICT_PACK"):
        placed_on(Cluster(4, 4), monkeypatch, workers=1, server_resources={"CPU": 5}, strategy="STRICT_PACK")
