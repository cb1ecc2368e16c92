"""A launcher's own output: what a stream does not take is lost and marked, a reader's end is noticed, and neither is an error."""

from __future__ import annotations

import errno
import io
import os
import pty
from pathlib import Path
from typing import IO, Any

import pytest

from psgc.launch.supervision.sink import Sink


class Disk(io.RawIOBase):
    """As a file on a disk with so many bytes of ``room``; and of each write at most ``most`` are taken."""

    def __init__(self, room: int = 1 << 20, most: int = 1 << 20) -> None:
        self.room, self.most, self.kept = room, most, b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data[: min(self.room, self.most)])
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.kept, self.room = self.kept + taken, self.room - len(taken)
        return len(taken)


def over(raw: Any, line_buffering: bool = False) -> IO[str]:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", line_buffering=line_buffering)


def test_a_stream_that_takes_a_part_of_a_write_gets_the_rest() -> None:
    """As a pipe does when a signal comes amid the write."""
    disk = Disk(most=3)
    Sink(over(disk), "psgc run").write(b"one line\nand another\n")
    assert disk.kept == b"one line\nand another\n"


def test_what_was_printed_comes_before() -> None:
    disk = Disk()
    stream = over(disk)
    print("printed", file=stream)
    Sink(stream, "psgc run").write(b"relayed\n")
    assert disk.kept == b"printed\nrelayed\n"


def test_what_a_full_disk_does_not_take_is_lost_and_a_line_in_its_place_says_so_once_there_is_room() -> None:
    disk = Disk(room=6)
    sink = Sink(over(disk), "psgc run")
    for line in (b"one\n", b"two\n", b"three\n"):
        sink.write(line)
    assert (disk.kept, sink.lost, sink.gone) == (b"one\ntw", "No space left on device", False)
    disk.room = 1 << 20
    sink.write(b"four\n")
    sink.write(b"five\n")
    mark = "psgc run: output is missing here, because it could not be written (No space left on device)"
    assert disk.kept.decode().splitlines() == ["one", "tw", mark, "four", "five"]
    assert sink.lost == ""


def test_a_reader_that_is_gone_is_noticed_and_nothing_that_comes_later_is_an_error() -> None:
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    sink = Sink(stream, "psgc run")
    os.close(read)
    sink.write(b"line\n")
    assert sink.gone
    sink.write(b"line\n")
    print("by others in the same process", file=stream)
    stream.close()


def test_a_terminal_that_is_lost_is_a_reader_that_is_gone() -> None:
    terminal, end = pty.openpty()
    stream = os.fdopen(end, "w")
    sink = Sink(stream, "psgc run")
    os.close(terminal)
    sink.write(b"line\n")
    assert sink.gone
    stream.close()


def test_a_file_that_fails_for_once_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as stream:
        sink = Sink(stream, "psgc run")

        def fails(_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patched:
            patched.setattr(sink, "_write_whole", fails)
            sink.write(b"one\n")
        assert (sink.lost, sink.gone) == ("Input/output error", False)
        sink.write(b"two\n")
    assert (tmp_path / "log").read_text().endswith("(Input/output error)\ntwo\n")
