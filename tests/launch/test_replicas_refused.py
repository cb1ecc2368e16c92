"""Where PSGC_REPLICAS=1 cannot be kept, that is said before anything starts, and what may be done."""

from __future__ import annotations

from typing import Any

import pytest

from psgc.config import Config
from psgc.errors import ConfigError, UsageError
from psgc.launch.job.part import standbys_of
from psgc.launch.job.run import run_job

JOB = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "2", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "PSGC_REPLICAS": "1"}


@pytest.mark.parametrize(("more", "said"), [
    ({"DMLC_NUM_SERVER": "1"}, "PSGC_REPLICAS=1 and DMLC_NUM_SERVER=1: what a server keeps is sent to another server's machine"),
    ({"PSGC_ON_SERVER_LOSS": "stop"}, "PSGC_REPLICAS=1 and PSGC_ON_SERVER_LOSS=stop"),
    ({"PSGC_BACKUP_WORKERS": "1"}, "PSGC_REPLICAS=1 and PSGC_BACKUP_WORKERS=1: late contributions have no replicas"),
    ({"PSGC_WIRE": "pslite"}, "PSGC_REPLICAS=1 and PSGC_WIRE=pslite"),
    ({"PSGC_DEAD_S": "900"}, "PSGC_REPLICAS=1 and PSGC_DEAD_S=900, PSGC_STEP_TIMEOUT_S=600: workers would give up a server that is lost before"),
    ({"PSGC_STEP_TIMEOUT_S": "60"}, "have PSGC_DEAD_S well below PSGC_STEP_TIMEOUT_S, or leave it at 0"),
])  # fmt: skip
@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_what_does_not_fit_is_named(role: Any, more: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.from_env({**JOB, **more}, role=role).require_cluster()


def test_servers_that_workers_start_have_no_standbys() -> None:
    config = Config.from_env({"PSGC_REPLICAS": "1", "PSGC_SERVERS": "embedded", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
                              "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9000"})  # fmt: skip
    with pytest.raises(ConfigError, match=r"PSGC_REPLICAS=1 and PSGC_SERVERS=embedded: .*start servers with psgc-launch, or leave it at 0"):
        config.require_replicable()


def test_a_job_on_one_machine_refuses_what_could_not_outlive_it(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSGC_REPLICAS", "1")
    with pytest.raises(UsageError, match="PSGC_REPLICAS=1: all servers of this job are on this machine, so that nothing outlives it"):
        run_job(["true"], servers=2)


def test_ports_of_standbys_are_behind_those_of_the_servers() -> None:
    env = {
        **JOB,
        "DMLC_ROLE": "server",
        "PSGC_LOCAL_SERVERS": "2",
        "DMLC_PORT": "9100",
        "PSGC_ADVERTISE": "here:9200",
        "DMLC_SERVER_ID": "0",
    }
    assert standbys_of(env) == [{"DMLC_PORT": "9102", "PSGC_ADVERTISE": "here:9202"}, {"DMLC_PORT": "9103", "PSGC_ADVERTISE": "here:9203"}]
    assert standbys_of({**env, "PSGC_REPLICAS": "0"}) == []
