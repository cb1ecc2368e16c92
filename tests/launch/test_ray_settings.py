"""What psgc.ray.launch refuses before it asks Ray for anything."""

from __future__ import annotations

import pytest

from psgc.errors import ConfigError
from psgc.launch.on_ray.launching import _check


@pytest.mark.parametrize("policy", ["wait", "shrink"])
def test_a_job_whose_workers_nobody_replaces_cannot_wait_for_them(policy: str) -> None:
    _check({"PSGC_ON_WORKER_LOSS": "stop"}, 2, 1)
    with pytest.raises(ConfigError, match=f"PSGC_ON_WORKER_LOSS={policy}: nobody starts another process"):
        _check({"PSGC_ON_WORKER_LOSS": policy}, 2, 1)
