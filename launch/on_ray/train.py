"""``psgc.ray.Config``: Ray Train's TorchConfig for scripts that use psgc, whose workers start the scheduler and the servers themselves.

Ray Train's own workers meet as under TorchConfig, and torch.distributed is set up as there. Beside that they get what PSGC_SERVERS=embedded asks for, and the
job's secret, which the driver draws.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from psgc.errors import UsageError

try:
    import ray.train
    from ray.train.torch import TorchConfig
except ImportError as error:
    raise UsageError(f'psgc.ray.Config needs Ray Train: pip install "ray[train]" ({error})') from None

LEAVE_S: Final = 5.0  # Ray kills workers whose function has ended; by then they have left their job


@dataclass
class Config(TorchConfig):  # type: ignore[misc]
    """``TorchTrainer(..., torch_config=psgc.ray.Config())``. servers: of the whole job, which nodes share; None: one on each. settings: PSGC_* of
    all workers."""

    servers: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @property
    def backend_cls(self) -> Any:
        return _Backend


class _Backend(TorchConfig().backend_cls):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: Config) -> None:
        super().on_start(worker_group, backend_config)
        nodes = max(worker_group.execute(_node_rank)) + 1
        env = {
            "PSGC_SERVERS": "embedded", "PSGC_TOKEN": backend_config.token, "GROUP_WORLD_SIZE": str(nodes),
            **({} if backend_config.servers is None else {"DMLC_NUM_SERVER": str(backend_config.servers)}), **backend_config.settings,
        }  # fmt: skip
        worker_group.execute(_set_up, env)

    def on_shutdown(self, worker_group: Any, backend_config: Config) -> None:
        worker_group.execute(_leave)
        super().on_shutdown(worker_group, backend_config)


def _node_rank() -> int:
    return int(ray.train.get_context().get_node_rank())


def _set_up(env: Mapping[str, str]) -> None:
    os.environ.update(env, GROUP_RANK=str(_node_rank()))


def _leave() -> None:
    """Nothing runs at the end of a process that Ray kills. Not for long: of a job that has failed, ranks may be anywhere."""
    from psgc.torch.session import api

    leaving = threading.Thread(target=api.shutdown, name="psgc-leave", daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
