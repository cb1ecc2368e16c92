"""The environment becomes one checked Config, or one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from psgc.config import VARIABLES, Config
from psgc.errors import ConfigError
from psgc.launch.envdoc import render

CLUSTER = {"DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}


def test_docs_env_md_is_the_table_in_the_code() -> None:
    page = Path(__file__).parent.parent / "docs" / "env.md"
    assert page.read_text() == render(), "run: python -m psgc.launch.envdoc > docs/env.md"


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
        ("PSGC_TRANSPORT", "rdma", "one of auto, tcp, shm"),
        ("DMLC_ROLE", "boss", "one of worker, server, scheduler"),
    ],
)
def test_a_wrong_value_is_said_with_what_was_expected(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=name) as error:
        Config.from_env({**CLUSTER, name: value})
    assert said in str(error.value)


def test_names_without_effect_and_unknown_names_are_noted() -> None:
    notes = Config.from_env({**CLUSTER, "BYTEPS_NCCL_NUM_RINGS": "4", "PSGC_PARTBYTES": "1"}).notes
    assert [("BYTEPS_NCCL_NUM_RINGS" in n and "no effect" in n) or ("PSGC_PARTBYTES" in n and "unknown" in n) for n in notes] == [
        True,
        True,
    ]


def test_the_token_is_not_printed() -> None:
    assert "hush" not in repr(Config.from_env({**CLUSTER, "PSGC_TOKEN": "hush"}))
