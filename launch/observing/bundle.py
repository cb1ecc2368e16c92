"""What a bug report needs of one machine, as an archive: logs, settings, versions, the doctor's findings, how the job does, traces.

Invariant: every byte that goes into the archive has passed ``Secrets``: no value of a variable that names a secret is in it, of no process that was looked at.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import re
import socket
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from psgc import __version__
from psgc.launch.observing.processes import command, environment
from psgc.variables import LAUNCHER_VARIABLES, OF_OTHERS, VARIABLES, WITHOUT_EFFECT

MOST_LOG_BYTES: Final = 20 << 20  # of a log, its end
MOST_TRACE_BYTES: Final = 100 << 20  # of a trace's file; a larger one is left out, and named
MASK: Final = "(left out)"
_SECRET_NAME: Final = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE", re.IGNORECASE)
_IN_TEXT: Final = re.compile(rb"((?:token|secret|passw(?:or)?d)[\"']?\s*[=:]\s*[\"']?)(?!\(left out\))([^\s\"'&,;]+)", re.IGNORECASE)
# Others' variables that say how a job was started; all the rest of an environment is nobody's business.
_TOLD: Final = re.compile(
    r"^(PSGC|DMLC|BYTEPS|OMP|MKL|OPENBLAS|NCCL|GLOO|SLURM_(JOB_ID|NTASKS|NNODES|PROCID|LOCALID)|TORCH|CUDA_VISIBLE|NVIDIA_VISIBLE)"
)
_RANKS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Secrets:
    """Takes secrets out of whatever it is given."""

    def __init__(self) -> None:
        self._values: set[bytes] = set()

    def learn(self, env: Mapping[str, str]) -> None:
        """Values of variables whose names say that they are secret. Shorter ones than four letters would be found everywhere."""
        for name, value in env.items():
            for text in (value, value.strip()) if _SECRET_NAME.search(name) else ():
                if len(text) >= 4:
                    self._values |= {text.encode(errors="replace"), json.dumps(text)[1:-1].encode()}

    def without(self, data: bytes) -> bytes:
        for value in sorted(self._values, key=len, reverse=True):
            data = data.replace(value, MASK.encode())
        return _IN_TEXT.sub(lambda found: found[1] + MASK.encode(), data)


class Bundle:
    """An archive under construction. secrets: of all processes that were looked at; known before the first file is added."""

    def __init__(self, secrets: Secrets) -> None:
        self.secrets = secrets
        self._data = io.BytesIO()
        self._archive = tarfile.open(fileobj=self._data, mode="w:gz")  # noqa: SIM115 - closed by ``close``
        self.names: list[str] = []

    def add(self, name: str, data: bytes) -> None:
        entry = tarfile.TarInfo(self.secrets.without(name.encode()).decode(errors="replace"))
        data = self.secrets.without(data)
        entry.size, entry.mtime = len(data), int(time.time())
        self._archive.addfile(entry, io.BytesIO(data))
        self.names.append(entry.name)

    def add_json(self, name: str, value: Any) -> None:
        self.add(name, json.dumps(value, indent=1).encode())

    def close(self) -> bytes:
        self._archive.close()
        return self._data.getvalue()


def gather(pids: Sequence[int], logs: Iterable[Path], doctor: Mapping[str, Any], status: Mapping[str, Any]) -> Bundle:
    """This machine's part. pids: of the job's processes here; logs: further files; doctor: its findings; status: what the scheduler says, or why it does
    not."""
    secrets = Secrets()
    secrets.learn(os.environ)
    of_processes = {pid: environment(pid) for pid in pids}
    for env in of_processes.values():
        secrets.learn(env)
    bundle = Bundle(secrets)
    bundle.add_json("versions.json", _versions())
    bundle.add_json("doctor.json", doctor)
    bundle.add_json("status.json", status)
    bundle.add_json(
        "configuration.json", [{"pid": pid, "command": command(pid), "environment": told(env)} for pid, env in of_processes.items()]
    )
    files = {file for pid in pids for file in _outputs(pid)} | {path.resolve() for path in logs}
    for path in sorted(files):
        bundle.add(f"logs/{_flat(path)}", _end_of(path))
    folders = {_folder(pid, env) for pid, env in of_processes.items()} - {None}
    for folder in sorted(folder for folder in folders if folder is not None and folder.is_dir()):
        for path in sorted(folder.rglob("*.json")) + sorted(folder.rglob("*.toml")):
            small = path.is_file() and path.stat().st_size <= MOST_TRACE_BYTES
            bundle.add(f"traces/{_flat(path)}" + ("" if small else ".left-out"), path.read_bytes() if small else b"larger than 100 MiB\n")
    return bundle


def told(env: Mapping[str, str]) -> dict[str, str]:
    """Of an environment what says how a job was started; of secrets, only that they are set."""
    ours = {name for variable in VARIABLES for name in (variable.name, *variable.aliases)} | {
        *LAUNCHER_VARIABLES,
        *WITHOUT_EFFECT,
        *OF_OTHERS,
        *_RANKS,
    }
    return {name: MASK if _SECRET_NAME.search(name) else value for name, value in sorted(env.items()) if name in ours or _TOLD.search(name)}


def _versions() -> dict[str, Any]:
    packages = {distribution.metadata["Name"]: distribution.version for distribution in importlib.metadata.distributions()}
    system = {"python": sys.version, "platform": platform.platform(), "host": socket.gethostname(), "cores": os.cpu_count()}
    return {"psgc": __version__, **system, "packages": dict(sorted(packages.items(), key=lambda entry: str(entry[0]).lower()))}


def _outputs(pid: int) -> set[Path]:
    """Files to which the process's output goes."""
    found = set()
    for number in (1, 2):
        try:
            path = Path(os.readlink(f"/proc/{pid}/fd/{number}"))
            if path.is_file():
                found.add(path.resolve())
        except OSError:
            continue
    return found


def _folder(pid: int, env: Mapping[str, str]) -> Path | None:
    """Where the process writes its timeline."""
    name = env.get("PSGC_TRACE", "").strip() or (env.get("BYTEPS_TRACE_DIR", "").strip() if env.get("BYTEPS_TRACE_ON") == "1" else "")
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"), name) if name else None
    except OSError:
        return None


def _flat(path: Path) -> str:
    return str(path).strip("/").replace("/", "_")


def _end_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_LOG_BYTES))
            return file.read(MOST_LOG_BYTES)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}\n".encode()
