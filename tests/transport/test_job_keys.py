"""A job's tokens: what a file of them may have, and who connects to whom while a token is replaced."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from psgc.config import Config
from psgc.errors import ConfigError, PsgcError
from psgc.processes import token_file
from psgc.processes.token_file import read_tokens
from psgc.transport.control.dealer import Dealer
from psgc.transport.control.router import Router
from psgc.transport.security.job_keys import JobKeys
from psgc.wire.frames import Header, Kind

ENV = {"DMLC_ROLE": "server", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9"}


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    while MEMBERS:
        MEMBERS.pop().dealer.close()
    made.destroy(0)


def test_the_newest_is_first_and_comments_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# a comment\n\n  beta22 \nalpha1 # since May\nbeta22\n")
    assert read_tokens(str(file)) == ("beta22", "alpha1")
    config = Config.from_env(ENV | {"PSGC_TOKEN": "not this one", "PSGC_TOKEN_FILE": str(file)})
    assert (config.token, config.tokens) == ("alpha1", ("beta22", "alpha1"))
    assert "alpha1" not in repr(config) and "beta22" not in repr(config)
    assert Config.from_env(ENV | {"PSGC_TOKEN": "one"}).tokens == ("one",)
    assert Config.from_env(ENV).tokens == () and JobKeys.of(Config.from_env(ENV)) is None


def test_a_file_that_is_replaced_before_the_keys_are_made_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("old\n")
    config = Config.from_env(ENV | {"PSGC_TOKEN_FILE": str(file)})
    file.write_text("new\nold\n")
    keys = JobKeys.of(config)
    assert keys is not None and keys.read_again() and keys.tokens == ("new", "old")
    assert not keys.read_again()


@pytest.mark.parametrize(
    ("text", "says"), [("", "it has no tokens"), ("#\n", "no tokens"), ("a\nb\nc\nd\ne", "it has 5 tokens"), (None, "No such file")]
)
def test_a_file_without_tokens_is_refused_with_its_name(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"PSGC_TOKEN_FILE={file}: .*{says}"):
        Config.from_env(ENV | {"PSGC_TOKEN_FILE": str(file)})


def test_a_process_that_follows_another_waits_for_a_file_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has the tokens, and goes on: it is no wrong setting."""
    file, looks = tmp_path / "tokens", list[float]()
    follows = ENV | {"PSGC_INCARNATION": "2", "PSGC_TOKEN_FILE": str(file)}

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            file.write_text("back\n")

    monkeypatch.setattr(token_file.time, "sleep", sleep)
    with pytest.raises(ConfigError):
        Config.from_env(follows | {"PSGC_INCARNATION": "1"})
    assert (Config.from_env(follows).token, len(looks)) == ("back", 3)
    file.unlink()
    with pytest.raises(PsgcError, match=r"it cannot be read \(No such file or directory\), for 1e-09 s \(PSGC_DEAD_S\)$") as raised:
        Config.from_env(follows | {"PSGC_DEAD_S": "1e-9"})
    assert not isinstance(raised.value, ConfigError)


def written(file: Path, text: str) -> None:
    """Each version has a time of its own, however quickly one follows another."""
    stamp = file.stat().st_mtime_ns + 1_000_000_000 if file.exists() else 10**18
    file.write_text(text)
    os.utime(file, ns=(stamp, stamp))


def test_a_file_is_read_again_when_it_changes_and_what_is_wrong_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    written(file, "one")
    keys = JobKeys(7, ("one",), str(file))
    assert not keys.read_again()
    before = keys.keys
    for text, tokens in (("two\none", ("two", "one")), ("", ("two", "one")), ("two", ("two",))):
        written(file, text)
        assert keys.read_again() == bool(text)
        assert keys.tokens == tokens
        assert not keys.read_again()
    assert len(keys.keys) == 1 and keys.keys != before
    file.unlink()
    assert not keys.read_again() and keys.tokens == ("two",)


def test_a_file_that_cannot_be_read_for_a_moment_is_named_once_and_read_later_though_nobody_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, read = tmp_path / "tokens", Path.read_text
    written(file, "one")
    keys = JobKeys(7, ("one",), str(file))
    assert not keys.read_again()

    def refused(path: Path, *args: Any, **named: Any) -> str:
        if path == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return read(path, *args, **named)

    for text in ("two\none", "two"):
        written(file, text)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_text", refused)
            assert not any(keys.read_again() for _ in range(3))
        said = [record.getMessage() for record in caplog.records if str(file) in record.getMessage()]
        assert said == [f"PSGC_TOKEN_FILE={file}: it cannot be read (Permission denied); the tokens stay what they were"]
        caplog.clear()
        assert keys.read_again() and keys.tokens == tuple(text.split())
        assert not keys.read_again()


MEMBERS: list[Member] = []


class Member:
    def __init__(self, context: zmq.Context[Any], port: int, keys: JobKeys) -> None:
        self.dealer = Dealer(context, f"tcp://127.0.0.1:{port}", os.urandom(4).hex().encode(), 15.0, keys)
        MEMBERS.append(self)

    def heard(self, router: Router) -> bool:
        """Whether something that it says comes through, after whatever its connection needs."""
        for _ in range(600):
            self.dealer.send(Header(Kind.HEARTBEAT, job=7, payload_bytes=1), b"x")
            list(self.dealer.events())
            self.dealer.tick(time.monotonic())
            if self.dealer.turned_away(silent=False):
                return False
            if router.socket.poll(20) and any(identity == self.dealer._identity for identity, *_ in router.receive()):
                return True
        raise AssertionError("neither let in nor refused")


def test_while_old_and_new_stand_in_all_files_it_does_not_matter_who_has_read_which(context: zmq.Context[Any], tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    written(file, "old")
    keys = JobKeys(7, ("old",), str(file))
    router = Router(context, "tcp://127.0.0.1:*", 15.0, keys=keys)
    late, early = Member(context, router.port, JobKeys(7, ("old",))), Member(context, router.port, JobKeys(7, ("new", "old")))
    assert late.heard(router) and early.heard(router)
    written(file, "new\nold")
    assert keys.read_again()
    assert not router.rekey(), "nobody's connection breaks"
    assert late.heard(router) and early.heard(router)
    assert Member(context, router.port, JobKeys(7, ("old",))).heard(router)
    written(file, "new")
    assert keys.read_again()
    assert router.rekey()
    assert early.heard(router), "it connects again, under the new one"
    assert Member(context, router.port, JobKeys(7, ("new",))).heard(router)
    assert not late.heard(router)
    assert not Member(context, router.port, JobKeys(7, ("old",))).heard(router)
    router.close()


def test_a_port_that_is_kept_open_by_another_stays_so(context: zmq.Context[Any]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        keys = JobKeys(7, ("old",))
        port = listening.getsockname()[1]
        router = Router(context, f"tcp://127.0.0.1:{port}", 15.0, os.dup(listening.fileno()), keys=keys)
        member = Member(context, port, JobKeys(7, ("new", "old")))
        assert member.heard(router)
        keys.tokens, keys.keys = ("new",), JobKeys(7, ("new",)).keys
        assert router.rekey()
        assert member.heard(router)
        router.close()
