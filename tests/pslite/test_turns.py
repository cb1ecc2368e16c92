"""Sums on servers that overwrite them, as BytePS's do: right where all workers are psgc's, and refused where some are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psgc.errors import ConfigError
from psgc.pslite import KVWorker, Postoffice
from psgc.pslite.actions import Action
from psgc.pslite.byteps.randomk import RandomK
from psgc.pslite.byteps.server import BytepsServer
from psgc.pslite.byteps.turns import ENDPOINT_NAME, SECOND_KEY, refuse_races
from psgc.pslite.meta import Meta
from psgc.pslite.scheduler import Scheduler
from psgc.worker.pslite.compression import Compression
from psgc.worker.pslite.session import PsLiteSession
from tests.pslite.overwriting import OverwritingServer
from tests.pslite.test_offices import free_port, run_all, settings
from tests.pslite.test_session import Buffer, both, job, of

ROUNDS = 300


def adversary(office: Postoffice) -> OverwritingServer:
    return OverwritingServer(office, late=(11, 13), rounds=ROUNDS)


def posing_as_psgcs(office: Postoffice) -> OverwritingServer:
    """A server that overwrites sums, and says that it does not: workers use one key."""
    office.endpoint_name = ENDPOINT_NAME
    return adversary(office)


def wrong_sums(sessions: list[PsLiteSession]) -> int:
    """Elements of all workers' sums that are wrong, over rounds without a pause. The tensor has two parts, which lie on two servers if there are two."""

    def steps(session: PsLiteSession) -> int:
        wrong, start = 0, np.arange(3000, dtype=np.float32)
        for step in range(ROUNDS):
            array = start * session.rank + step
            session.wait([session.submit_named(of("x", 3000), Buffer(array))])
            wrong += int((array != start * 3 + 3 * step).sum())
        return wrong

    return sum(both(sessions, steps))


def test_a_server_that_overwrites_sums_gives_wrong_ones_to_workers_that_use_one_key() -> None:
    """So the tests below would find a worker that pushes too early."""
    with job(3, [posing_as_psgcs]) as (sessions, _):
        assert wrong_sums(sessions) > 3000 * ROUNDS


@pytest.mark.parametrize("servers", [[adversary], [BytepsServer], [adversary, BytepsServer]], ids=["BytePS's", "psgc's", "one of each"])
def test_three_hundred_rounds_of_three_workers_are_right_in_every_element(servers: list[Callable[[Postoffice], Any]]) -> None:
    with job(3, servers) as (sessions, _):
        assert wrong_sums(sessions) == 0
        assert len(sessions[0]._declared.two_key_servers) == servers.count(adversary)


def test_ranks_may_submit_tensors_in_any_order_and_wait_for_them_later() -> None:
    with job(3, [adversary]) as (sessions, _):
        names = [f"t{i}" for i in range(3)]

        def steps(session: PsLiteSession) -> None:
            session.expect_names(names)
            rng = np.random.default_rng(session.rank)
            for step in range(ROUNDS):
                arrays = {name: np.full(3000, i + 10 * session.rank + 100 * step, np.float32) for i, name in enumerate(names)}
                order = [names[i] for i in rng.permutation(3)]
                tickets = [session.submit_named(of(name, 3000), Buffer(arrays[name])) for name in order]
                session.wait(tickets)
                for i, name in enumerate(names):
                    assert (arrays[name] == 3 * i + 30 + 300 * step).all(), (session.rank, step, name)

        both(sessions, steps)


def test_both_keys_of_a_tensor_have_their_compressors_and_one_residual() -> None:
    """randomk's places are the same on all workers and the server, if each key's random numbers are."""
    numel, k = 1000, 100
    rng = np.random.default_rng(0)
    values = rng.normal(size=(12, 3, numel)).astype(np.float32)
    text = f"randomk:k={k}"
    seeds = [int(dict(found.settings)["seed"]) for turn in range(2) if (found := Compression(text, 5).registration_of(turn))]
    assert seeds[0] == 5 and seeds[1] != 5
    streams = [RandomK(numel, k, seed) for seed in seeds]
    wanted, residuals = [], np.zeros((3, numel), np.float32)
    for step, all_ranks in enumerate(values):
        corrected = all_ranks + residuals
        places = np.frombuffer(streams[step % 2].encode(np.zeros(numel, np.float32)), "<u4")[::2]
        kept = np.zeros(numel, bool)
        kept[places] = True
        residuals = np.where(kept, 0, corrected).astype(np.float32)
        wanted.append(np.where(kept, corrected[0] + corrected[1] + corrected[2], 0))
    with job(3, [OverwritingServer], PSGC_SEED="5") as (sessions, _):

        def steps(session: PsLiteSession) -> list[NDArray[Any]]:
            got = []
            for step in range(len(values)):
                array = values[step, session.rank].copy()
                session.wait([session.submit_named(of("x", numel, codec=text), Buffer(array))])
                got.append(array)
            return got

        for got in both(sessions, steps):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_tensor_is_broadcast_again_and_from_other_roots_with_the_same_key() -> None:
    for server in (OverwritingServer, BytepsServer):
        made: list[Any] = []
        with job(3, [lambda office, made=made, server=server: made.append(server(office))]) as (sessions, _):

            def broadcasts(session: PsLiteSession) -> None:
                for round_, root in enumerate((0, 0, 1, 2, 1)):
                    layout = session.declare(replace(of("x", 6, kind="broadcast"), name=f"broadcast.Parameter.{root}", root=root))
                    array = np.full(6, 10.0 * session.rank + round_, np.float32)
                    session.wait([session.submit(layout, 0, Buffer(array), skip=session.rank != root)])
                    assert (array == 10 * root + round_).all(), (session.rank, round_, array)

            both(sessions, broadcasts)
        if server is OverwritingServer:
            assert made[0].keys == [0, SECOND_KEY]


class StockWorker(Postoffice):
    """A worker that joins as byteps's do, without a name."""

    def __init__(self, port: int, workers: int, servers: int) -> None:
        super().__init__(settings("worker", port, workers, servers))
        KVWorker(self)


def mixed_job(racy: bool) -> list[Any]:
    """The outcomes for a worker of psgc's, one that is not, a server of each kind, and psgc's scheduler."""
    port = free_port()
    own, *others = (Postoffice(settings(role, port, 2, 2, racy=racy)) for role in ("worker", "server", "scheduler"))
    own.endpoint_name = ENDPOINT_NAME
    BytepsServer(others[0])
    theirs = [StockWorker(port, 2, 2), Postoffice(settings("server", port, 2, 2))]
    OverwritingServer(theirs[1])

    def start(office: Postoffice) -> str:
        office.start(barrier=False)
        try:
            refuse_races(office)
        except ConfigError as error:
            return str(error)
        finally:
            office.finalize(barrier=False)
        return ""

    return run_all(
        [
            *[lambda each=office: start(each) for office in (own, *others)],
            *[lambda each=office: each.start(barrier=False) for office in theirs],
        ]
    )


def test_a_scheduler_that_leaves_endpoint_names_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """psgc's workers would take each other for BytePS's, and use one key."""
    add = Scheduler._add

    def forgetful(self: Scheduler, sender: int, meta: Meta, now: float) -> list[Action]:
        return add(self, sender, replace(meta, nodes=tuple(replace(node, endpoint_name=b"") for node in meta.nodes)), now)

    monkeypatch.setattr(Scheduler, "_add", forgetful)

    for said in mixed_job(False)[:2]:
        assert "does not pass on the endpoint names of nodes" in said and "one of this version of psgc" in said


def test_bytepss_workers_beside_psgcs_on_bytepss_servers_are_refused_by_all_of_psgcs_processes(caplog: pytest.LogCaptureFixture) -> None:
    for said in mixed_job(False)[:3]:
        assert "are BytePS's: its servers mix the steps of its workers, and sums can be wrong; start psgc's servers" in said
        assert "PSGC_PSLITE_RACY=1" in said and "\n" not in said
    with caplog.at_level(logging.WARNING):
        assert mixed_job(True)[:3] == ["", "", ""]
    assert sum("PSGC_PSLITE_RACY=1: workers" in record.message for record in caplog.records) == 3
