"""Hosts over ssh, for tests: a real sshd for each address, in this machine's network or in a namespace."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Launched
from tests.ports import free_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")
LACKING = next((f"there is no {tool} (Debian: {package})" for tool, package, found in (
    ("sshd", "openssh-server", SSHD), ("ssh", "openssh-client", shutil.which("ssh")), ("ssh-keygen", "openssh-client", shutil.which("ssh-keygen")),
) if not found), "")  # fmt: skip
needs_sshd = pytest.mark.skipif(bool(LACKING), reason=LACKING)


class Sshd:
    """Hosts alpha, beta and gamma, for whoever has this folder's key; processes that it starts carry the test's mark."""

    def __init__(self, launched: Launched, folder: Path) -> None:
        self.launched, self.folder, self.processes = launched, folder, []  # type: ignore[var-annotated]
        for key in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
        self.start_s = 200.0  # a busy machine may take long
        self.addresses: dict[str, tuple[str, int]] = {}
        if os.getuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)

    def listen(self, names: Sequence[str], address: str = "127.0.0.1", within: Sequence[str] = ()) -> None:
        """Serve these hosts at one address. within: what runs a command there."""
        port = free_port()
        mark, _, value = self.launched.mark.decode().partition("=")
        settings = self.folder / f"sshd-{port}"
        settings.write_text(
            f"Port {port}\nListenAddress {address}\nHostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/key.pub\nPidFile none\nUsePAM no\n"
            f"StrictModes no\nPasswordAuthentication no\nSetEnv {mark}={value} PSGC_SILENCE_S=5\nMaxStartups 100\n"
        )
        with (self.folder / "sshd.log").open("a") as log:
            self.processes.append(subprocess.Popen([*within, str(SSHD), "-D", "-e", "-f", str(settings)], stderr=log))
        for name in names:
            self.addresses[name] = (address, port)
        with (self.folder / "config").open("a") as config:
            for name in names:
                config.write(
                    f"Host {name}\n  HostName {address}\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {self.folder}/key\n"
                    f"  IdentitiesOnly yes\n  UserKnownHostsFile {self.folder}/known\n  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
                )
        while subprocess.run(
            [*within, sys.executable, "-S", "-c", f"import socket; socket.create_connection(({address!r}, {port}))"],
            stderr=subprocess.DEVNULL,
            check=False,
        ).returncode:
            time.sleep(0.05)

    @property
    def ssh(self) -> str:
        return shlex.join(["ssh", "-F", str(self.folder / "config")])

    def hosts(self, *lines: str) -> str:
        path = self.folder / "hosts"
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    def run(self, hosts: Sequence[str], *flags: str, command: Sequence[str] = (), **env: str) -> subprocess.Popen[str]:
        words = ("run", "--ssh", self.ssh, "--start-timeout", str(self.start_s), "--hostfile", self.hosts(*hosts), *flags, "--", *command)
        return self.launched.psgc(*words, **env)

    def ended(self, *arguments: Any, **options: Any) -> tuple[int, str, str]:
        return self.launched.end(self.run(*arguments, **options))

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.wait()


def await_line(popen: subprocess.Popen[str], words: str, count: int = 1) -> str:
    assert popen.stdout is not None
    text = ""
    for line in popen.stdout:
        text += line
        count -= words in line
        if not count:
            return text
    pytest.fail(f"it ended without saying {words!r}: {text}{popen.communicate()[1]}")
