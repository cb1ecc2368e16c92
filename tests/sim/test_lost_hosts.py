"""Hosts that are lost with a worker, a server, and another server's standby at once: another process takes the rank, the standby the server's place, and every
rank still gets exactly the published sum of every step."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from sim_replicas import Losses, MovingWorker, ReplicatedServer, ReplicatedWorld
from simulation import Scenario, simulate
from test_lost_workers import MortalWorker, MortalWorld

from psgc.wire.messages import Register

SAMPLE = 200
CHUNK = 50
LONG = 20_000
LONG_CHUNK = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLosses(Losses):
    """Machine i has server i, a standby, and worker i, if there is one. replace_s: until another process begins in a worker's place, on average: before the
    scheduler takes the worker for dead, or after. deaths: of workers' processes elsewhere."""

    replace_s: float = 1.0
    deaths: int = 0
    death_every_s: float = 0.1
    hand_s: float = 0.0  # this and the next as in Deaths
    scheduler_dies_behind: float = 0.0


class HostsWorker(MovingWorker, MortalWorker):
    """A worker that dies with its host, and is told where servers have moved."""


class HostsWorld(ReplicatedWorld, MortalWorld):
    """A World in which whole hosts are lost."""

    scenario: HostLosses  # type: ignore[assignment]

    def __init__(self, scenario: HostLosses) -> None:
        self.both = 0  # hosts that were lost with a worker
        with patch("test_lost_workers.MortalWorker", HostsWorker):
            super().__init__(scenario)

    def run(self) -> HostsWorld:
        with patch("test_lost_workers.MortalWorker", HostsWorker):
            super().run()
        return self

    def alive(self, register: Register) -> bool | None:
        """Members are on other hosts than the scheduler: they are known by their silence."""
        return None

    def _lose(self, aimed: ReplicatedServer | None = None) -> None:
        before = {standby.number for standby in self.standbys if standby.lost}
        super()._lose(aimed)
        for number in {standby.number for standby in self.standbys if standby.lost} - before:
            self._lose_worker(number)

    def _lose_worker(self, number: int) -> None:
        """Unless nobody would be left who has the job's state, or somebody has come to the end."""
        everyone = [worker for worker in self.workers if isinstance(worker, MortalWorker)]
        victim = next((worker for worker in everyone if worker.node == number), None)
        losses = self.scheduler.state.losses
        if victim is None or losses is None or any(worker.coordinator.left or (worker.ended and not worker.dead) for worker in everyone):
            return
        without = losses._handovers.without
        able = [worker for worker in everyone if worker.beginning is not None and not worker.dead and worker.node not in without]
        if victim.dead or victim.client is None or victim.done or not any(worker is not victim for worker in able):
            return
        self.both += 1
        victim.die()
        self.dead.add((victim.node, victim.incarnation))
        self.clock.after(self.scenario.replace_s * 2 * self.rng.random(), self._follow, victim)


def losing(seed: int) -> HostLosses:
    """A scenario of the simulation at large, in which a host is lost, and processes end as well."""
    rng, drawn = random.Random(f"hosts {seed}"), Scenario.drawn(seed)
    fields = {name: getattr(drawn, name) for name in Scenario.__dataclass_fields__}
    fields |= {"workers": max(2, drawn.workers), "node_sizes": (), "restores": False, "saves": 0.0, "publishes": False, "hurry": 0.0, "barriers": 0.0,
               "broadcasts": 0, "cuts_early": False, "servers": rng.choice((2, 2, 3, 4)), "steps": drawn.steps + 3, "crashes": rng.choice((0, 0, 2)),
               "crash_every_s": rng.choice((0.005, 0.02, 0.1)), "restart_s": rng.choice((0.01, 0.1))}  # fmt: skip
    return HostLosses(
        **fields, lost_after_s=rng.choice((0.005, 0.02, 0.1, 0.3)), standby_crashes=rng.choice((0, 0, 2)), replace_s=rng.choice((0.05, 5.0, 30.0)),
        deaths=rng.choice((0, 0, 1)), death_every_s=rng.choice((0.02, 0.1)),
    )  # fmt: skip


def run(scenario: HostLosses) -> HostsWorld:
    world = simulate(scenario, HostsWorld)  # type: ignore[arg-type]
    assert isinstance(world, HostsWorld)
    return world


@pytest.mark.parametrize("first", range(0, SAMPLE, CHUNK))
def test_a_host_that_is_lost_with_a_worker_and_a_server_at_any_moment_changes_no_sum(first: int) -> None:
    worlds: list[Any] = [run(losing(seed)) for seed in range(first, first + CHUNK)]
    assert sum(world.both > 0 and world.moves > 0 for world in worlds) > CHUNK / 8


@pytest.mark.long
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + LONG, LONG_CHUNK))
def test_a_host_that_is_lost_with_a_worker_and_a_server_changes_no_sum_in_very_many_jobs(first: int) -> None:
    for seed in range(first, first + LONG_CHUNK):
        run(losing(seed))
