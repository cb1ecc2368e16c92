"""The settings with which one process takes part in a ps-lite job, and the address that it listens on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psgc.config import Config
from psgc.errors import ConfigError
from psgc.processes.addresses import interface_address, is_loopback

Role = Literal["worker", "server", "scheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """host: address that this process listens on. port: 0 for any. Times are in seconds; a heartbeat or resend time of 0: none."""

    role: Role
    workers: int
    servers: int
    root_host: str
    root_port: int
    host: str = "127.0.0.1"
    port: int = 0
    local_files: bool = False  # sockets are files of /tmp instead of TCP (DMLC_LOCAL)
    heartbeat_s: float = 0.0
    dead_s: float = 0.0
    resend_s: float = 0.0
    silence_s: float = 5.0
    join_timeout_s: float = 300.0
    step_timeout_s: float = 600.0
    racy: bool = False  # byteps's workers may share byteps's servers with psgc's (PSGC_PSLITE_RACY)

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Raises ConfigError for settings that ps-lite cannot honour, or an interface that does not exist."""
        config.require_cluster()
        for name, value in (("PSGC_TOKEN", config.token), ("PSGC_ENCRYPT=1", config.encrypt), ("PSGC_PLAN", config.plan)):
            if value:
                raise ConfigError(
                    f"PSGC_WIRE=pslite and {name}: ps-lite has no authentication, no encryption and no plans; unset one of the two"
                )
        if config.async_mode:
            raise ConfigError(
                "PSGC_WIRE=pslite and PSGC_ASYNC=1 (BYTEPS_ENABLE_ASYNC): stock servers abort at the first pull of asynchronous training; unset one of the two"
            )
        if not config.servers:
            raise ConfigError(
                "PSGC_WIRE=pslite and DMLC_NUM_SERVER=0: ps-lite's workers exchange gradients by servers only; start one or more"
            )
        if config.local_size > 1:
            raise ConfigError(
                f"PSGC_WIRE=pslite and BYTEPS_LOCAL_SIZE={config.local_size}: over ps-lite each worker is a node of its own; start each with "
                f"BYTEPS_LOCAL_SIZE=1, a DMLC_WORKER_ID of its own, and count all in DMLC_NUM_WORKER"
            )
        if config.role == "scheduler":
            host = config.root_host
        else:
            interface = config.interface or "lo"
            host = config.node_host or interface_address(interface, f"DMLC_INTERFACE={interface}")
        return cls(
            role=config.role, workers=config.nodes, servers=config.servers, root_host=config.root_host, root_port=config.root_port, host=host,
            port=config.root_port if config.role == "scheduler" else config.port, local_files=config.local_files, heartbeat_s=config.pslite_heartbeat_s,
            dead_s=config.pslite_dead_s, resend_s=config.pslite_resend_ms / 1e3 if config.pslite_resend else 0.0, silence_s=config.silence_s,
            join_timeout_s=config.register_timeout_s, step_timeout_s=config.step_timeout_s, racy=config.pslite_racy,
        )  # fmt: skip

    @property
    def warning(self) -> str:
        """The warning for everybody who starts a role."""
        reach = "every user of this machine" if is_loopback(self.host) else f"everybody who reaches {self.host}"
        return f"PSGC_WIRE=pslite: ps-lite has no authentication: {reach} can read and change this job's gradients (docs/pslite.md)"
