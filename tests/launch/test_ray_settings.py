"""What psgc.ray.launch refuses, and what it tells all processes, before it asks Ray for anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from psgc.errors import ConfigError, UsageError
from psgc.launch.on_ray.launching import _check, _settings
from tests.launch.plan_files import plan_file


@pytest.mark.parametrize("policy", ["wait", "shrink"])
def test_a_job_whose_workers_nobody_replaces_cannot_wait_for_them(policy: str) -> None:
    _check({"PSGC_ON_WORKER_LOSS": "stop"}, 2, 1)
    with pytest.raises(ConfigError, match=f"PSGC_ON_WORKER_LOSS={policy}: nobody starts another process"):
        _check({"PSGC_ON_WORKER_LOSS": policy}, 2, 1)


@pytest.mark.usefixtures("clean_environment")
def test_a_plans_settings_of_nodes_inside_go_along_where_its_file_is(tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "plan.json", reduce_roots=(1, 3))
    assert _settings({"PSGC_PLAN": plan})["BYTEPS_REDUCE_ROOTS"] == "1,3"
    assert _settings({"PSGC_PLAN": plan, "BYTEPS_REDUCE_ROOTS": "2"})["BYTEPS_REDUCE_ROOTS"] == "2"
    assert "BYTEPS_REDUCE_ROOTS" not in _settings({"PSGC_PLAN": str(tmp_path / "elsewhere.json")})


@pytest.mark.usefixtures("clean_environment")
def test_a_relative_path_of_a_plan_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_file(tmp_path / "plan.json", reduce_roots=(1, 3))
    monkeypatch.chdir(tmp_path)
    found = _settings({"PSGC_PLAN": "plan.json"})
    assert (found["PSGC_PLAN"], found["BYTEPS_REDUCE_ROOTS"]) == (plan, "1,3")
    assert _settings({"PSGC_PLAN": "auto"})["PSGC_PLAN"] == "auto" and "PSGC_PLAN" not in _settings({})
    with pytest.raises(UsageError, match="quality=none-such"):
        _settings({"PSGC_PLAN": "auto:quality=none-such"})
