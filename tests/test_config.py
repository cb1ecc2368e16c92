"""The environment becomes one checked Config, or one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from psgc.config import Config
from psgc.errors import ConfigError
from psgc.launch.pages.env import render
from psgc.torch.session.embedded import Embedded
from psgc.variables import VARIABLES, WITHOUT_EFFECT
from psgc.worker.connect import open_session

CLUSTER = {"DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}


def test_docs_env_md_is_the_table_in_the_code() -> None:
    page = Path(__file__).parent.parent / "docs" / "env.md"
    assert page.read_text() == render(), "run: python -m psgc.launch.pages.env > docs/env.md"


def test_no_two_variables_set_one_field() -> None:
    assert len({v.field for v in VARIABLES}) == len(VARIABLES)


def test_byteps_names_are_honoured() -> None:
    config = Config.from_env({**CLUSTER, "BYTEPS_PARTITION_BYTES": "8192", "DMLC_WORKER_ID": "1", "BYTEPS_LOCAL_RANK": "0"})
    assert (config.part_bytes, config.node, config.root_endpoint) == (8192, 1, "tcp://10.0.0.1:9000")
    assert not config.solo


def test_without_a_scheduler_a_worker_is_alone() -> None:
    assert Config.from_env({}).solo


def test_one_worker_is_alone_unless_forced_as_in_byteps() -> None:
    one = {**CLUSTER, "DMLC_NUM_WORKER": "1"}
    assert Config.from_env(one).solo
    assert not Config.from_env({**one, "BYTEPS_FORCE_DISTRIBUTED": "1"}).solo


def test_torchruns_variables_without_torchrun_are_told_how_servers_get_started() -> None:
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR=localhost is set, as torchrun does, .*PSGC_SERVERS=embedded.*docs/clusters\.md"):
        Config.from_env(torchrun).require_cluster()
    Config.from_env({**torchrun, "DMLC_PS_ROOT_PORT": "9000"}).require_cluster()
    with pytest.raises(ConfigError, match=r"needs DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT .*, got '10\.0\.0\.1' and 'none'"):
        Config.from_env({**torchrun, "DMLC_PS_ROOT_URI": "10.0.0.1"}).require_cluster()


TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip


def test_under_torchrun_workers_start_the_servers_one_a_node_unless_others_do() -> None:
    config = Config.from_env(TORCHRUN)
    assert config.embedded and (config.nodes, config.node, config.servers) == (2, 1, 2)
    assert Config.from_env({**TORCHRUN, "DMLC_NUM_SERVER": "3"}).servers == 3
    for others in (
        {"DMLC_PS_ROOT_PORT": "9"},
        {"DMLC_PS_ROOT_URI": "10.0.0.2"},
        {"DMLC_NUM_WORKER": "2"},
        {"PSGC_SERVERS": "external"},
        {"DMLC_ROLE": "worker"},
    ):
        assert not Config.from_env({**TORCHRUN, **others}).embedded
    assert not Config.from_env(TORCHRUN, role="server").embedded


def test_embedded_servers_can_be_asked_for_where_something_else_sets_torchruns_variables() -> None:
    elsewhere = {name: value for name, value in TORCHRUN.items() if name not in ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "GROUP_WORLD_SIZE")}
    assert not Config.from_env(elsewhere).embedded
    config = Config.from_env({**elsewhere, "PSGC_SERVERS": "embedded", "DMLC_PS_ROOT_PORT": "9000"})
    assert config.embedded and (config.nodes, config.node, config.root_port) == (2, 1, 9000)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {**TORCHRUN, "DMLC_PS_ROOT_URI": "10.0.0.2"},
            r"the workers start the scheduler, but DMLC_PS_ROOT_URI=10\.0\.0\.2 names one that others start",
        ),
        ({}, "needs torch.distributed's variables, as torchrun sets them, but RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are missing"),
        ({**TORCHRUN, "PSGC_WIRE": "pslite"}, "starts servers of psgc's own wire, but PSGC_WIRE=pslite"),
    ],
)
def test_embedded_servers_that_cannot_be_are_refused(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^PSGC_SERVERS=embedded:? {said}"):
        Config.from_env({**env, "PSGC_SERVERS": "embedded"})


@pytest.mark.parametrize("policy", ["wait", "shrink"])
def test_workers_that_no_launcher_of_psgcs_has_started_are_not_replaced(policy: str) -> None:
    others = {"DMLC_PS_ROOT_URI": "10.0.0.2", "DMLC_PS_ROOT_PORT": "9", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}
    asked = {"PSGC_ON_WORKER_LOSS": policy}
    for env in (TORCHRUN, {**TORCHRUN, **others}, {**TORCHRUN, **others, "PSGC_SERVERS": "external"}):
        with pytest.raises(ConfigError, match=f"^PSGC_ON_WORKER_LOSS={policy} under torchrun, which itself ends all workers"):
            Config.from_env({**env, **asked}).require_replaceable()
    elsewhere = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    with pytest.raises(ConfigError, match=f"^PSGC_ON_WORKER_LOSS={policy} and PSGC_SERVERS=embedded: nobody starts another process"):
        Config.from_env({**elsewhere, **asked, "PSGC_SERVERS": "embedded"}).require_replaceable()
    with pytest.raises(ConfigError, match="nobody starts another process"):
        Embedded(Config.from_env({**elsewhere, **asked, "PSGC_SERVERS": "embedded"}), 0).start()
    Config.from_env({**elsewhere, **others, **asked}).require_replaceable()
    Config.from_env({**TORCHRUN, **others, **asked, "PSGC_LAUNCHER": "@psgc"}).require_replaceable()
    Config.from_env({**TORCHRUN, **others, **asked}, role="worker").require_replaceable()  # a launcher of psgc's


def test_nodes_of_different_sizes_are_counted_as_torchrun_counts_them() -> None:
    config = Config.from_env({**TORCHRUN, "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "RANK": "5"})
    assert (config.nodes, config.node, config.local_size) == (2, 1, 2)


def test_torchrun_is_understood() -> None:
    env = {
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "9",
    }
    config = Config.from_env(env)
    assert (config.nodes, config.node, config.local_rank, config.local_size, config.root_host) == (2, 1, 3, 4, "10.0.0.1")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DMLC_NUM_WORKER", "two", "expected a whole number, at least 1"),
        ("DMLC_WORKER_ID", "2", "nodes are numbered 0 to 1"),
        ("DMLC_PS_ROOT_PORT", "70000", "ports go up to 65535"),
        ("PSGC_HEARTBEAT_S", "-1", "seconds above 0"),
        ("PSGC_TRANSPORT", "rdma", "expected one of auto, "),
        ("DMLC_ROLE", "boss", "one of worker, server, scheduler"),
        ("DMLC_ROLE", "wroker", "did you mean worker?"),
        ("PSGC_LOG_LEVEL", "warn", "did you mean warning?"),
    ],
)
def test_a_wrong_value_is_said_with_what_was_expected(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=name) as error:
        Config.from_env({**CLUSTER, name: value})
    assert said in str(error.value)


def test_an_interface_by_name_is_where_workers_and_servers_are_reached_as_in_ps_lite() -> None:
    job = {**CLUSTER, "DMLC_INTERFACE": "lo"}
    assert [Config.from_env(job, role=role).node_host for role in ("worker", "server", "scheduler")] == ["127.0.0.1", "127.0.0.1", ""]
    assert Config.from_env({**job, "DMLC_NODE_HOST": "10.0.0.7"}).node_host == "10.0.0.7"
    assert Config.from_env({"DMLC_INTERFACE": "nosuch0"}).solo, "who is alone needs none"
    with pytest.raises(ConfigError, match=r"^DMLC_INTERFACE=nosuch0: no interface 'nosuch0' with an IPv4 address; this machine has .*lo"):
        Config.from_env({**job, "DMLC_INTERFACE": "nosuch0"})


def test_log_levels_of_byteps_are_psgcs_nearest() -> None:
    levels = ("TRACE", "debug", "Info", "WARNING", "error", "Fatal")
    found = [Config.from_env({"BYTEPS_LOG_LEVEL": level}).log_level for level in levels]
    assert found == ["debug", "debug", "info", "warning", "error", "error"]


@pytest.mark.parametrize(
    "forced", [{"BYTEPS_FORCE_DISTRIBUTED": "1"}, {"BYTEPS_LOCAL_SIZE": "2"}, {"WORLD_SIZE": "2"}, {"DMLC_NUM_WORKER": "2"}]
)
def test_one_of_several_workers_does_not_train_alone_for_want_of_an_address(forced: dict[str, str]) -> None:
    name, value = next(iter(forced.items()))
    with pytest.raises(ConfigError, match=f"{name}={value} is set, but DMLC_PS_ROOT_URI, .* is missing: .*; set .* or unset {name}$"):
        open_session(Config.from_env(forced))


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_that_mpirun_or_srun_starts_without_an_address_do_not_train_alone_each(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=2: mpirun or srun started several processes, .* DMLC_NUM_WORKER are missing"):
        open_session(Config.from_env({name: "2"}))
    assert open_session(Config.from_env({name: "1"})).size == 1
    assert open_session(Config.from_env({name: "2", "DMLC_NUM_WORKER": "1"})).size == 1, "psgc's own settings count first"


def test_an_address_without_a_number_of_nodes_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"DMLC_PS_ROOT_URI=10\.0\.0\.1 names a scheduler, but DMLC_NUM_WORKER is missing"):
        open_session(Config.from_env({"DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000"}))


@pytest.mark.parametrize("env", [
    {},
    {"DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0", "DMLC_ROLE": "worker"},
    {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "1234"},  # BytePS's tutorial
    {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    {"DMLC_NUM_WORKER": "1", "WORLD_SIZE": "2"},  # DMLC_* counts first
])  # fmt: skip
def test_a_job_of_one_is_none_to_be_refused(env: dict[str, str]) -> None:
    assert open_session(Config.from_env(env)).size == 1


@pytest.mark.parametrize(("name", "meant"), [
    ("DMLC_PS_ROOT_URL", "DMLC_PS_ROOT_URI"), ("DMLC_NUM_WORKERS", "DMLC_NUM_WORKER"), ("DLMC_NUM_WORKER", "DMLC_NUM_WORKER"),
    ("PSGC_NUM_WORKER", "DMLC_NUM_WORKER"), ("DMLC_WORKERID", "DMLC_WORKER_ID"), ("BYTEPS_LOCALSIZE", "BYTEPS_LOCAL_SIZE"),
])  # fmt: skip
def test_a_misspelt_name_that_would_make_another_job_is_refused_unless_the_right_one_is_set(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=3 is set, but psgc knows no such name; did you mean {meant}\\? Else unset it$"):
        Config.from_env({name: "3"})
    assert any(name in note for note in Config.from_env({"DMLC_NUM_WORKER": "2", name: "3", meant: "1"}).notes) or name.startswith("DLMC")


def test_with_the_port_set_a_misspelt_host_is_the_uri() -> None:
    with pytest.raises(ConfigError, match="did you mean DMLC_PS_ROOT_URI"):
        Config.from_env({"DMLC_PS_ROOT_HOST": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000"})


def test_other_misspelt_names_are_noted_with_what_was_meant() -> None:
    notes = Config.from_env({"PSGC_CODEX": "int8", "PSGC_PARTBYTES": "1", "BYTEPS_SOMETHING": "1"}).notes
    assert notes == (
        "BYTEPS_SOMETHING is set but unknown; see docs/env.md for the names psgc honours",
        "PSGC_CODEX is set but unknown; did you mean PSGC_CODEC?",
        "PSGC_PARTBYTES is set but unknown; did you mean PSGC_PART_BYTES?",
    )


def test_no_name_that_byteps_or_ps_lite_has_is_taken_for_a_misspelt_one() -> None:
    others = dict.fromkeys([*WITHOUT_EFFECT, "DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "DMLC_JOB_CLUSTER", "DMLC_NUM_ATTEMPT"], "1")
    assert not [note for note in Config.from_env(others).notes if "did you mean" in note]


def test_names_without_effect_and_unknown_names_are_noted() -> None:
    notes = Config.from_env({**CLUSTER, "BYTEPS_NCCL_NUM_RINGS": "4", "PSGC_PARTBYTES": "1"}).notes
    assert [("BYTEPS_NCCL_NUM_RINGS" in n and "no effect" in n) or ("PSGC_PARTBYTES" in n and "unknown" in n) for n in notes] == [
        True,
        True,
    ]


def test_the_token_is_not_printed() -> None:
    assert "hush" not in repr(Config.from_env({**CLUSTER, "PSGC_TOKEN": "hush"}))


def test_payloads_are_not_encrypted_by_keys_that_travel_in_clear() -> None:
    env = {**CLUSTER, "PSGC_ENCRYPT": "1"}
    for role in ("worker", "server", "scheduler"):
        with pytest.raises(ConfigError, match=r"PSGC_ENCRYPT=1 without PSGC_TOKEN: .* set PSGC_TOKEN"):
            Config.from_env({**env, "DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_ROLE": role}).require_cluster()
    Config.from_env({**env, "DMLC_PS_ROOT_URI": "10.0.0.1", "PSGC_TOKEN": "secret"}).require_cluster()
    Config.from_env({**env, "DMLC_PS_ROOT_URI": "127.0.0.1"}).require_cluster()


def test_bytepss_partition_bytes_are_raised_to_what_is_possible_with_one_line_and_psgcs_own_are_refused() -> None:
    config = Config.from_env({**CLUSTER, "BYTEPS_PARTITION_BYTES": "1000"})
    assert config.part_bytes == 4096
    assert config.notes == ("BYTEPS_PARTITION_BYTES=1000 is raised to 4096, the least that parts can have",)
    assert not Config.from_env({**CLUSTER, "BYTEPS_PARTITION_BYTES": "2147483647"}).notes
    with pytest.raises(ConfigError, match="PSGC_PART_BYTES='1000' is wrong"):
        Config.from_env({**CLUSTER, "PSGC_PART_BYTES": "1000"})


@pytest.mark.parametrize("name", ["PSGC_METRICS_PORT", "PSGC_STATUS_PORT"])
def test_a_port_that_there_is_none_of_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='65536' is wrong: expected a whole number from 1 to 65535"):
        Config.from_env({name: "65536"})
    Config.from_env({name: "65535"})
