"""A machine's part of a job, as its environment tells it: which roles it has, how many servers, on which ports. Starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from psgc.config import Config
from psgc.errors import ConfigError
from psgc.launch.topology.devices import local_size
from psgc.launch.topology.interfaces import named, place_of
from psgc.processes.addresses import join, split

ROLES: Final = ("scheduler", "server", "worker")
JOINT: Final = ("server", "worker")
REQUIRED: Final = ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")


def roles_of(env: Mapping[str, str]) -> tuple[str, ...]:
    """The roles of this machine, in the order of ROLES. Raises ConfigError if a setting that one needs is missing or wrong."""
    text = env.get("DMLC_ROLE", "").strip().lower() or ("worker" if one_machine(env) else "")
    names = {role.strip() for item in text.split(",") for role in (JOINT if item.strip() == "joint" else (item,))}
    if not text or not names <= set(ROLES):
        Config.from_env({k: v for k, v in env.items() if k != "DMLC_ROLE"})  # a misspelt setting may be why no role was found
        came = f"={env['DMLC_ROLE']!r}" if env.get("DMLC_ROLE", "").strip() else " is not set"
        raise ConfigError(f"DMLC_ROLE{came}: expected worker, server, scheduler or joint, or several with commas; see psgc-launch --help")
    roles = tuple(role for role in ROLES if role in names)
    for role in roles:
        _check_role(role, env)
    if roles != ("scheduler",) and not (one_machine(env) and local_size(env) > 1):  # which tell of them themselves
        for note in Config.from_env(of_machine(env), role=roles[-1]).notes:
            print(f"psgc-launch: {note}", file=sys.stderr)
    return roles


def _check_role(role: str, env: Mapping[str, str]) -> None:
    config = Config.from_env({k: v for k, v in of_machine(env).items() if k != "DMLC_WORKER_ID"}, role=role)
    required = () if one_machine(env) else REQUIRED + (("DMLC_WORKER_ID",) if role == "worker" else ())
    missing = [name for name in required if not env.get(name, "").strip()]
    if missing:
        raise ConfigError(f"{role}: missing {', '.join(missing)}; set them to the same job on every machine (docs/env.md)")
    if role == "server" and not one_machine(env):
        config.require_cluster()


def of_machine(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that describe a single process."""
    return {name: value for name, value in env.items() if name not in ("DMLC_ROLE", "BYTEPS_LOCAL_RANK", "LOCAL_RANK")}


def one_machine(env: Mapping[str, str]) -> bool:
    """Whether the job is what BytePS calls non-distributed: one node, without BYTEPS_FORCE_DISTRIBUTED. Does not validate the values."""
    forced = env.get("BYTEPS_FORCE_DISTRIBUTED", "").strip()
    return env.get("DMLC_NUM_WORKER", "").strip() == "1" and forced in ("", "0")


def servers_of(env: Mapping[str, str]) -> list[dict[str, str]]:
    """What differs between the servers of this machine: PSGC_LOCAL_SERVERS of them, on ports one after the other where a port is named."""
    config = Config.from_env(of_machine(env), role="server")
    servers = []
    for number in range(local_servers(config, env)):
        own = place_of(env, number)
        if config.server_index >= 0:
            own["DMLC_SERVER_ID"] = str(config.server_index + number)
        if config.port:
            own["DMLC_PORT"] = str(config.port + number)
        if config.advertise:
            host, port = split(config.advertise)
            own["PSGC_ADVERTISE"] = join(host, port + number)
        servers.append(own)
    return servers


def standbys_of(env: Mapping[str, str]) -> list[dict[str, str]]:
    """Of the processes that take the places of servers of other machines: as many as this machine has servers, on the ports behind theirs."""
    config, servers = Config.from_env(of_machine(env), role="server"), servers_of(env)
    if not config.replicas:
        return []
    standbys = [{key: text for key, text in own.items() if key != "DMLC_SERVER_ID"} for own in servers]
    for own in standbys:
        if "DMLC_PORT" in own:
            own["DMLC_PORT"] = str(int(own["DMLC_PORT"]) + len(servers))
        if "PSGC_ADVERTISE" in own:
            host, port = split(own["PSGC_ADVERTISE"])
            own["PSGC_ADVERTISE"] = join(host, port + len(servers))
    return standbys


def local_servers(config: Config, env: Mapping[str, str]) -> int:
    """Servers of this machine, where its role is server: PSGC_LOCAL_SERVERS, else one for each interface that PSGC_INTERFACES names, if every
    machine has workers and servers and DMLC_NUM_SERVER counts as many for each, else 1. Raises ConfigError."""
    names = env.get("DMLC_ROLE", "").lower()
    joint = "joint" in names or all(role in names for role in JOINT)
    each = named(env) if joint and config.servers == config.nodes * named(env) else 1
    text = env.get("PSGC_LOCAL_SERVERS", "").strip() or str(max(1, each))
    if not text.isdigit() or not 1 <= int(text) <= max(1, config.servers):
        raise ConfigError(
            f"PSGC_LOCAL_SERVERS={text!r}: expected how many of the job's servers (DMLC_NUM_SERVER={config.servers}) run on this machine"
        )
    return int(text)
