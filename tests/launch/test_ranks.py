"""torch.distributed's variables: every worker of a job is told the rank that psgc gives it, and one place where all meet."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from psgc.config import Config
from psgc.errors import ConfigError
from psgc.launch.job import ranks

NAMES = (*ranks.NAMES, *ranks.MASTER)
# Prints what torch.distributed would read, and what psgc says.
CODE = f"import os, json; print(json.dumps({{n: os.environ.get(n) for n in {NAMES}}}))"
BOTH = f"import os, json, psgc.torch as p; p.init(); print(json.dumps([[os.environ[n] for n in {NAMES}], p.rank(), p.size()])); p.barrier()"
NODE = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000"}
FOREIGN = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "9", "GROUP_RANK": "7", "TORCHELASTIC_RUN_ID": "other"}


def told(launched: Any, *arguments: str, **env: str) -> list[dict[str, str]]:
    """What the workers of a launcher on this machine saw, by rank."""
    launch = launched.psgc if arguments[0] == "run" else launched.psgc_launch
    command = (*arguments[:-1], "--no-prefix", arguments[-1]) if arguments[0] == "run" else ()
    status, out, err = launched.end(launch(*command, sys.executable, "-c", CODE, **env))
    assert status == 0, err
    lines = [line.partition("{")[2] for line in out.splitlines()]
    return sorted((json.loads("{" + line) for line in lines), key=lambda seen: int(seen["RANK"]))


def test_exported_ranks_are_psgcs_own_on_nodes_of_different_size(launched: Any) -> None:
    run = ("run", "--no-prefix", "--workers", "3", "--nodes", "2", "--", sys.executable, "-c", BOTH)
    status, out, err = launched.end(launched.psgc(*run, **FOREIGN, MASTER_ADDR="10.9.9.9", MASTER_PORT="1"))
    assert status == 0, err
    seen = [json.loads(line) for line in out.splitlines()]
    assert sorted((tuple(env[:5]), rank, size) for env, rank, size in seen) == [
        (("0", "3", "0", "2", "0"), 0, 3),
        (("1", "3", "1", "2", "0"), 1, 3),
        (("2", "3", "0", "1", "1"), 2, 3),
    ]
    assert len({tuple(env[5:]) for env, _, _ in seen}) == 1, "all meet at one place"
    address, port = seen[0][0][5:]
    assert (address, int(port) in ranks.FREE_PORTS) == ("127.0.0.1", True), "a worker's shell: its job's meeting place is not this one's"


def test_a_meeting_place_that_the_user_has_set_stays(launched: Any) -> None:
    seen = told(launched, "run", "--", MASTER_ADDR="localhost", MASTER_PORT="24567")
    assert [(s["MASTER_ADDR"], s["MASTER_PORT"]) for s in seen] == [("localhost", "24567")] * 2


@pytest.mark.parametrize(
    ("env", "first", "world", "port"),
    [
        ({"DMLC_WORKER_ID": "1"}, 2, "6", "9001"),
        ({"DMLC_WORKER_ID": "2", "DMLC_PS_ROOT_PORT": "9499"}, 4, "6", "9500"),
        ({"DMLC_WORKER_ID": "1", "PSGC_NODE_SIZES": "1,2,4"}, 1, "7", "9001"),
        ({"DMLC_WORKER_ID": "1", "WORLD_SIZE": "6", "MASTER_PORT": "77", "RANK": "5", "LOCAL_RANK": "5"}, 2, "6", "77"),
    ],
)
def test_every_node_computes_its_own_ranks(launched: Any, env: Mapping[str, str], first: int, world: str, port: str) -> None:
    seen = told(launched, "launch", **{**NODE, "BYTEPS_LOCAL_SIZE": "2", **env})
    assert [(s["RANK"], s["LOCAL_RANK"]) for s in seen] == [(str(first), "0"), (str(first + 1), "1")]
    for s in seen:
        assert (s["WORLD_SIZE"], s["LOCAL_WORLD_SIZE"], s["GROUP_RANK"]) == (world, "2", env["DMLC_WORKER_ID"])
        assert (s["MASTER_ADDR"], s["MASTER_PORT"]) == ("127.0.0.1", port)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_a_pytorch_jobs_pods_are_told_ranks_of_workers_where_the_operator_numbers_pods(launched: Any, workers: int) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "1"}
    seen = told(launched, "launch", **pod, DMLC_ROLE="worker", DMLC_NUM_SERVER="1", BYTEPS_LOCAL_SIZE=str(workers))
    assert [tuple(s[name] for name in ranks.NAMES) for s in seen] == [
        (str(workers + local), str(3 * workers), str(local), str(workers), "1") for local in range(workers)
    ]
    assert {(s["MASTER_ADDR"], s["MASTER_PORT"]) for s in seen} == {("127.0.0.1", "23456")}


def test_one_process_a_node_keeps_the_ranks_it_was_given(launched: Any) -> None:
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
    (seen,) = told(launched, "launch", **NODE, DMLC_WORKER_ID="1", **given)
    assert {name: seen[name] for name in given} == given


def test_the_workers_of_one_node_meet_on_it_wherever_the_scheduler_is(launched: Any) -> None:
    one = {**NODE, "DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0", "DMLC_PS_ROOT_URI": "192.0.2.1", "BYTEPS_LOCAL_SIZE": "2"}
    seen = told(launched, "launch", **one)
    assert [s["MASTER_ADDR"] for s in seen] == ["127.0.0.1"] * 2
    assert len({s["MASTER_PORT"] for s in seen}) == 1
    assert int(seen[0]["MASTER_PORT"]) in ranks.FREE_PORTS


def test_a_rank_0_that_cannot_listen_where_all_would_meet_says_so(launched: Any) -> None:
    far = {**NODE, "DMLC_PS_ROOT_URI": "192.0.2.1", "DMLC_WORKER_ID": "0"}  # an address for documentation: nobody's
    status, _, err = launched.end(launched.psgc_launch(sys.executable, "-c", CODE, **far))
    *told, absent = err.splitlines()
    assert (status, len(told)) == (0, 1)
    assert "MASTER_ADDR is 192.0.2.1, not an address of this machine" in told[0]
    assert "never joined the job" in absent
    for quiet in ({**far, "DMLC_WORKER_ID": "1"}, {**far, "MASTER_ADDR": "127.0.0.1"}):
        assert launched.end(launched.psgc_launch(sys.executable, "-c", CODE, **quiet))[2].splitlines() == [absent]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"PSGC_NODE_SIZES": "2,2"}, "PSGC_NODE_SIZES='2,2': expected the number of workers on each of the 3 nodes"),
        ({"PSGC_NODE_SIZES": "2,x,2"}, "PSGC_NODE_SIZES='2,x,2'"),
        ({"PSGC_NODE_SIZES": "2,0,2"}, "PSGC_NODE_SIZES='2,0,2'"),
        ({"PSGC_NODE_SIZES": "2,3,2"}, "node 1 has 3 workers, but 2 start here"),
        ({"DMLC_WORKER_ID": "one"}, "DMLC_WORKER_ID='one'"),
    ],
)
def test_wrong_sizes_and_ports_are_one_line_and_status_2(launched: Any, env: dict[str, str], said: str) -> None:
    status, out, err = launched.end(launched.psgc_launch("true", **{**NODE, "DMLC_WORKER_ID": "1", "BYTEPS_LOCAL_SIZE": "2", **env}))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert said in err


def test_psgc_itself_goes_by_its_own_names() -> None:
    mine = {**NODE, "DMLC_WORKER_ID": "1", "BYTEPS_LOCAL_RANK": "1", "BYTEPS_LOCAL_SIZE": "2"}
    read = Config.from_env({**mine, **FOREIGN, "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "1"})
    assert replace(read, world_size=0, of_agent=False) == Config.from_env(mine), (
        "the size that others go by is only compared, and who started it told"
    )


def test_a_port_that_somebody_listens_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ranks, "FREE_PORTS", range(port, port + 101))
        assert ranks.free_port() != port


def test_sizes_that_nobody_named_are_taken_to_be_equal() -> None:
    assert ranks.node_sizes({}, nodes=3, node=1, local_size=2) == [2, 2, 2]
    with pytest.raises(ConfigError, match="set BYTEPS_LOCAL_SIZE=4 here"):
        ranks.node_sizes({"PSGC_NODE_SIZES": "1,4"}, nodes=2, node=1, local_size=2)


def test_the_meeting_place_of_an_ipv6_job_has_no_brackets() -> None:
    env = {"DMLC_PS_ROOT_URI": "[2001:db8::1]", "DMLC_PS_ROOT_PORT": "9000"}
    assert ranks.agreed_meeting_place(env, nodes=2) == {"MASTER_ADDR": "2001:db8::1", "MASTER_PORT": "9001"}
