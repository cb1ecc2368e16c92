"""The journal's files: what is whole is read, what is torn is not, and a journal is of one job."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psgc import __version__
from psgc.config import Config
from psgc.errors import ConfigError, PsgcError
from psgc.scheduler import continuity as continuity_module
from psgc.scheduler import loop
from psgc.scheduler.continuity import Continuity
from psgc.scheduler.journal import GROWN_BYTES, Journal, frame, read
from psgc.scheduler.records import (
    KINDS,
    Absent,
    Alone,
    Complete,
    Failed,
    Joined,
    LaidOut,
    Left,
    Mourned,
    Passed,
    Record,
    Turned,
    from_json,
    to_json,
)
from psgc.scheduler.sealing import digest, seal, unseal
from psgc.wire.messages import Register
from tests.ports import free_port
from tests.scheduler.talk import register

RECORDS: list[Record] = [
    Joined.of(b"w\xff0", register()),
    Complete(1),
    LaidOut.of("model", "d", b"{}"),
    Passed(1, 3),
    Turned(4, 5, 6),
    Mourned(0),
    Mourned(0, heard=True),
    Absent(1),
    Alone(0),
    Left("worker", 0),
    Left("server", 0, standby=True),
]
TOKEN = "a token that nobody guesses"


class Fds(list[int]):
    """A journal's two files. journals: that were opened with duplicates of them."""

    def __init__(self, fds: list[int]) -> None:
        super().__init__(fds)
        self.journals: list[Journal] = []


@pytest.fixture
def fds() -> Iterator[Fds]:
    found = Fds([os.memfd_create("journal") for _ in range(2)])
    yield found
    for journal in found.journals:
        journal.close()
    for fd in found:
        os.close(fd)


def opened(fds: Fds) -> Journal:
    journal = Journal([os.dup(fd) for fd in fds], "of a test")
    fds.journals.append(journal)
    return journal


def test_a_record_is_read_as_it_was_written() -> None:
    for record in RECORDS:
        assert from_json(json.loads(json.dumps(to_json(record)))) == record
    assert Joined.of(b"w\xff0", register()).read() == (b"w\xff0", register())
    assert len(KINDS) == 18


def test_a_journal_has_what_was_written_down(fds: Fds) -> None:
    journal = opened(fds)
    assert journal.records == []
    journal.begin(RECORDS[:2])
    for record in RECORDS[2:]:
        journal.append([record])
    assert opened(fds).records == RECORDS
    journal.begin(RECORDS[:1])
    assert opened(fds).records == RECORDS[:1], "written anew"
    journal.append(RECORDS[1:])
    again = opened(fds)
    again.append([Failed("why")])
    assert opened(fds).records == [*RECORDS, Failed("why")], "another process goes on in it"
    again.forget()
    assert opened(fds).records == []


def test_whatever_of_the_last_record_was_written_the_others_are_read_and_more_are_written_behind_them(fds: Fds) -> None:
    journal = opened(fds)
    journal.begin([])
    journal.append(RECORDS)
    current = fds[0]
    whole = os.pread(current, 1 << 20, 0)
    last = len(frame(to_json(RECORDS[-1])))
    for left in range(last):
        os.ftruncate(current, 0)
        os.pwrite(current, whole[: len(whole) - last + left], 0)
        torn = opened(fds)
        assert torn.records == RECORDS[:-1]
        torn.append([Failed("why")])
        assert opened(fds).records == [*RECORDS[:-1], Failed("why")]


def test_a_byte_that_was_changed_ends_what_is_read(fds: Fds) -> None:
    journal = opened(fds)
    journal.begin([])
    journal.append(RECORDS)
    whole, rng = os.pread(fds[0], 1 << 20, 0), random.Random(0)
    begun = len(frame({"journal": "psgc journal 1", "generation": 1})) + len(frame({"whole": True}))
    for _ in range(200):
        at = rng.randrange(begun, len(whole))
        os.pwrite(fds[0], whole, 0)
        os.pwrite(fds[0], bytes([whole[at] ^ rng.randint(1, 255)]), at)
        found = opened(fds).records
        assert found == RECORDS[: len(found)]
        assert len(found) < len(RECORDS)


def test_one_that_ends_while_it_is_written_anew_is_still_read(fds: Fds) -> None:
    journal = opened(fds)
    journal.begin(RECORDS)
    before = os.pread(fds[0], 1 << 20, 0)
    journal.begin([*RECORDS, Failed("why")])
    after = os.pread(fds[1], 1 << 20, 0)
    for written in range(len(after) + 1):
        os.pwrite(fds[0], before, 0)
        os.ftruncate(fds[1], 0)
        os.pwrite(fds[1], after[:written], 0)
        assert opened(fds).records == ([*RECORDS, Failed("why")] if written == len(after) else RECORDS)


def test_a_journal_says_when_it_has_grown(fds: Fds) -> None:
    journal = opened(fds)
    journal.begin(RECORDS)
    value = LaidOut("model", "d", "x" * (GROWN_BYTES // 4))
    for _ in range(4):
        assert not journal.grown
        journal.append([value])
    journal.append([value])
    assert journal.grown
    journal.begin(RECORDS)
    assert not journal.grown
    assert os.fstat(fds[0]).st_size + os.fstat(fds[1]).st_size < 10_000


def test_anything_at_all_is_read_or_refused() -> None:
    rng = random.Random(1)
    for _ in range(300):
        assert read(rng.randbytes(rng.randint(0, 300))) is None
    with pytest.raises(PsgcError, match="no record of a scheduler"):
        read(frame({"journal": "psgc journal 1", "generation": 1}) + frame({"what": "Unknown"}) + frame({"whole": True}))


# whose it is


def config(fds: Fds | None = None, **other: Any) -> Config:
    settings: dict[str, Any] = {
        "role": "scheduler",
        "nodes": 2,
        "servers": 1,
        "root_host": "127.0.0.1",
        "root_port": 1,
        "job": 77,
        "token": TOKEN,
    }
    return Config(**(settings | {"journal_fds": tuple(fds or ())} | other))


def complete(fds: Fds) -> Continuity:
    first = Continuity(config(fds), False)
    first.keep(RECORDS, list)
    return first


def test_another_process_goes_on_with_the_same_key(fds: Fds) -> None:
    first = complete(fds)
    again = Continuity(config(fds), False)
    assert (again.records, again.data_key, again.follows, again.again) == (RECORDS, first.data_key, True, False)
    assert not first.follows


def test_neither_the_token_nor_the_key_is_in_a_journal(fds: Fds) -> None:
    first = complete(fds)
    for fd in fds:
        text = os.pread(fd, 1 << 20, 0)
        assert TOKEN.encode() not in text
        assert first.data_key.hex().encode() not in text
    assert unseal(77, TOKEN, seal(77, TOKEN, first.data_key, bytes(16))) == first.data_key
    assert unseal(77, "another", seal(77, TOKEN, first.data_key, bytes(16))) != first.data_key
    assert digest(77, TOKEN) != digest(78, TOKEN)


@pytest.mark.parametrize("other", [{"job": 78}, {"nodes": 3}, {"servers": 2}, {"token": "another"}])
def test_a_journal_of_another_job_is_refused_in_a_line(fds: Fds, other: dict[str, Any]) -> None:
    complete(fds)
    with pytest.raises(PsgcError, match=r"journal .* is of job 77 with 2 nodes and 1 servers, written by psgc .* remove it") as raised:
        Continuity(config(fds, **other), False)
    assert "\n" not in str(raised.value)


def test_a_journal_is_sealed_by_every_token_that_the_job_accepts_and_is_taken_up_under_any_of_them(fds: Fds) -> None:
    first = complete(fds)
    with pytest.raises(PsgcError, match="PSGC_TOKEN was another"):
        Continuity(config(fds, token="newest"), False)
    first.rekey(("newest", TOKEN))
    for tokens in ({}, {"token": "newest"}, {"newer_tokens": ("newest",)}, {"token": "newest", "newer_tokens": ("newer still",)}):
        again = Continuity(config(fds, **tokens), False)
        assert (again.records, again.data_key) == (RECORDS, first.data_key)
    again.grown_to(RECORDS)  # by the process that follows, which knows "newest" and a newer one
    assert Continuity(config(fds, token="newer still"), False).data_key == first.data_key
    with pytest.raises(PsgcError, match="PSGC_TOKEN was another"):
        Continuity(config(fds), False)


def test_whoever_has_only_a_token_that_was_removed_cannot_take_a_journal_up(fds: Fds) -> None:
    first = complete(fds)
    first.rekey(("newest", TOKEN))
    first.rekey(("newest",))
    with pytest.raises(PsgcError, match="PSGC_TOKEN was another"):
        Continuity(config(fds), False)
    with pytest.raises(PsgcError, match="PSGC_TOKEN was another"):
        Continuity(config(fds, token=""), False)
    assert Continuity(config(fds, token="newest"), False).data_key == first.data_key


def test_a_job_that_was_not_complete_begins_anew(fds: Fds) -> None:
    first = Continuity(config(fds), False)
    again = Continuity(config(fds), False)
    assert again.follows
    assert again.records == []
    assert again.data_key != first.data_key


def test_a_job_that_is_over_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    of_path = config(journal=str(path))
    first = Continuity(of_path, False)
    first.keep(RECORDS, list)
    assert first.returns
    first.close()
    second = Continuity(of_path, False)
    assert second.records == RECORDS
    assert path.stat().st_mode & 0o777 == 0o600
    second.end()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_serves_another_job_says_so_to_the_one_that_follows_it(fds: Fds) -> None:
    complete(fds).end()
    second = Continuity(config(fds), True)
    assert second.records == []
    again = Continuity(config(fds), False)
    assert again.again
    assert again.follows


def test_a_journal_that_cannot_be_written_is_given_up_and_the_job_goes_on(
    fds: Fds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = complete(fds)
    monkeypatch.setattr(Journal, "append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    first.keep([Failed("why")], list)
    assert "No space left on device" in caplog.text
    assert "if this scheduler dies from now on, the job ends" in caplog.text
    assert opened(fds).records == [], "nobody takes up what is old"
    first.keep([Failed("why")], list)
    first.close()


def test_without_a_journal_nothing_is_kept(fds: Fds) -> None:
    for alone in (config(), config(fds, on_scheduler_loss="stop")):
        first = Continuity(alone, False)
        first.keep(RECORDS, list)
        first.close()
    assert opened(fds).records == []


def test_a_named_journal_needs_a_number_of_the_job() -> None:
    with pytest.raises(ConfigError, match="PSGC_JOURNAL=x without PSGC_JOB"):
        config(journal="x", job=0)


def test_what_is_written_names_the_version_that_wrote_it(fds: Fds, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(fds)
    monkeypatch.setattr(continuity_module, "__version__", "0.0.1")
    with pytest.raises(PsgcError, match=rf"written by psgc {__version__}; this is job 77 .* psgc 0\.0\.1"):
        Continuity(config(fds), False)


def test_a_registration_goes_through_a_journal_unchanged() -> None:
    whole = register(
        "server", index=3, more=("ucx://a:1",), encrypt=True, incarnation=2, lineage=9, session=4, switch=2, roots=(1, 2), planned=True, asynchronous=True
    )  # fmt: skip
    assert isinstance(whole, Register)
    assert Joined.of(b"s", whole).read() == (b"s", whole)


@pytest.mark.parametrize(
    "content", [b"#!/usr/bin/env python\nimport psgc\n", b"notes\n", frame({"journal": "psgc journal 2", "generation": 1})]
)
@pytest.mark.parametrize("which", ["journal", "journal.other"])
def test_a_file_that_is_no_journal_is_refused_in_a_line_and_stays_as_it_is(tmp_path: Path, which: str, content: bytes) -> None:
    (tmp_path / which).write_bytes(content)
    with pytest.raises(
        PsgcError,
        match=rf"^scheduler: .*/{which} is there and is no journal of this psgc; remove it, or name another file \(PSGC_JOURNAL\)$",
    ):
        Journal.at(str(tmp_path / "journal"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {which: content}


def test_a_journal_that_another_scheduler_writes_is_refused_until_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal.at(str(path))
    first.begin(RECORDS)
    with pytest.raises(
        PsgcError, match=rf"^scheduler: another scheduler that runs writes the journal {path}; end that one first, or name another"
    ):
        Journal.at(str(path))
    first.append([Passed(1, 4)])
    first.close()
    after = Journal.at(str(path))
    assert after.records == [*RECORDS, Passed(1, 4)]
    after.close()


def test_a_process_that_is_killed_leaves_its_journal_unlocked(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    code = "import sys; from psgc.scheduler.journal import Journal; kept = Journal.at(sys.argv[1]); kept.begin([]); print(flush=True); sys.stdin.read()"
    popen = subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert popen.stdout is not None and popen.stdout.readline() == b"\n"
    with pytest.raises(PsgcError, match="another scheduler that runs"):
        Journal.at(str(path))
    popen.kill()
    popen.communicate()
    Journal.at(str(path)).close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_files_cannot_be_locked_a_journal_is_written_all_the_same(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuses)
    Journal.at(str(tmp_path / "journal")).close()


def test_a_journal_that_was_cut_off_while_it_was_begun_is_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal.at(str(path))
    first.begin(RECORDS)
    first.close()
    whole = max((path.read_bytes(), Path(f"{path}.other").read_bytes()), key=len)
    for cut in (b"", bytes(100), *(whole[:size] for size in range(9, len(whole) + 1)), whole[:20] + bytes(80)):
        path.write_bytes(cut)
        Journal.at(str(path)).close()


@pytest.mark.parametrize("fails", [True, False])
def test_a_scheduler_that_ends_by_an_exception_leaves_its_journal_to_the_next(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be opened, say, for want of descriptors."""

    def run(self: Any) -> int:
        self._continuity.keep(RECORDS, lambda: RECORDS)
        if fails:
            raise MemoryError
        return 0

    monkeypatch.setattr(loop._Loop, "run", run)
    of_path = config(journal=str(tmp_path / "journal"), root_host="127.0.0.1", root_port=free_port(), servers=0)
    with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
        loop.serve(of_path)
    assert Continuity(of_path, False).records == (RECORDS if fails else [])
