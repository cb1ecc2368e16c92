"""The image's Dockerfile and compose.yaml, without an engine: what they set makes a job, and each RUN line does its work in a clean environment."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psgc.config import Config
from psgc.launch.job.healthy import unhealthy

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PLACES = ("/opt/psgc", "/src", "/home/psgc", "/work", "/tmp/pins", "/etc/passwd")


def steps() -> list[tuple[str, str]]:
    """Instruction and argument of each line, continued lines as one, comments left out."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest.strip()) for name, rest in re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE)]


def test_the_image_runs_as_a_user_and_says_whether_it_is_healthy() -> None:
    found = dict(steps())
    assert found["USER"] == "1000:1000" and found["ENTRYPOINT"] == '["psgc-launch"]'
    assert re.search(r'CMD \["python", "-m", "psgc\.launch\.job\.healthy"\]$', found["HEALTHCHECK"])
    order = [name for name, _ in steps()]
    assert order.index("USER") > max(number for number, name in enumerate(order) if name == "RUN"), "what runs before needs root"


def test_a_container_is_healthy_while_its_role_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert unhealthy({"DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_PORT": port}) == ""
        assert unhealthy({"DMLC_ROLE": "joint", "DMLC_PORT": port}) == ""
    assert f"the scheduler does not answer at port {port}" in unhealthy({"DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_PORT": port})
    assert "the server does not answer" in unhealthy({"DMLC_ROLE": "server", "DMLC_PORT": port})
    assert unhealthy({"DMLC_ROLE": "worker", "DMLC_PS_ROOT_PORT": port}) == unhealthy({}) == ""


def test_the_services_of_compose_make_a_job_of_two_workers() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert list(services) == ["scheduler", "server", "worker0", "worker1"]
    configs = {}
    for name, service in services.items():
        env = {**service["environment"], "PSGC_TOKEN": "given"}
        configs[name] = Config.from_env(env, role=env["DMLC_ROLE"])
        configs[name].require_cluster()
        assert configs[name].notes == ()
        if name != "scheduler":
            assert service["depends_on"] == {"scheduler": {"condition": "service_healthy"}}
    assert {(config.nodes, config.servers, config.root_endpoint) for config in configs.values()} == {(2, 1, "tcp://scheduler:9000")}
    assert [configs[name].node for name in ("worker0", "worker1")] == [0, 1]
    assert (ROOT / services["worker0"]["command"][1]).exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_run_line_does_its_work_in_a_clean_environment(tmp_path: Path) -> None:
    """Its places are below a folder, the environment is what the lines before it set, and torch comes from where pip gets its packages."""
    env = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
    env |= {"PATH": f"{Path(sys.executable).resolve().parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    for place in ("etc", "src", "opt", "home", "tmp"):
        (tmp_path / place).mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")

    def here(text: str) -> str:
        return re.sub("|".join(rf"(?<![\w/.]){re.escape(place)}" for place in PLACES), lambda found: f"{tmp_path}{found[0]}", text)

    folder = tmp_path
    for name, rest in steps():
        if name == "ARG":
            key, _, value = rest.partition("=")
            env[key] = (tmp_path / "tmp").as_uri() if key == "TORCH_INDEX" else value
        elif name == "ENV":
            for pair in shlex.split(rest):
                key, _, value = pair.partition("=")
                env[key] = here(value).replace("$PATH", env["PATH"])
        elif name == "WORKDIR":
            folder = Path(here(rest))
            folder.mkdir(exist_ok=True)
        elif name == "COPY":
            unwanted = shutil.ignore_patterns(*(ROOT / ".dockerignore").read_text().replace("**/", "").split())
            shutil.copytree(ROOT, folder, symlinks=True, ignore=unwanted, dirs_exist_ok=True)
        elif name == "RUN":
            subprocess.run(["sh", "-e", "-c", here(rest)], cwd=folder, env=env, check=True)
    python = tmp_path / "opt" / "psgc" / "bin" / "python"
    done = subprocess.run(
        [python, "-c", "import psgc.torch; print(psgc.__version__)"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()
    assert (tmp_path / "etc" / "passwd").read_text().splitlines()[1].startswith("psgc:x:1000:1000:")
    assert not list((tmp_path / "src").iterdir()) and list((tmp_path / "opt" / "psgc" / "kernels").iterdir())
    size = subprocess.run(["du", "-sm", tmp_path / "opt"], capture_output=True, text=True, check=True).stdout.split()[0]
    print(f"/opt/psgc has {size} MB")
