"""The output of processes is passed on line by line under their names; progress bars do not flood it, and nothing is lost."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable

import pytest

from psgc.launch.supervision.noting_relay import NotingRelay
from psgc.launch.supervision.relay import MAX_LINE_BYTES, Relay, coloured


def relayed(pieces: Iterable[bytes], prefix: str | None = "[a]", clock: Callable[[], float] = lambda: 0.0) -> tuple[str, Relay]:
    out = io.BytesIO()
    relay = Relay(prefix, out, clock)
    for piece in pieces:
        relay.feed(piece)
    relay.finish()
    return out.getvalue().decode(), relay


@pytest.mark.parametrize("cuts", [(), (1,), (3, 4), (6,), tuple(range(1, 13))])
def test_every_line_has_the_prefix_however_the_bytes_come(cuts: tuple[int, ...]) -> None:
    text = b"one\ntwo\r\n\nend"
    edges = (0, *cuts, len(text))
    assert relayed([text[a:b] for a, b in itertools.pairwise(edges)])[0] == "[a] one\n[a] two\n[a] \n[a] end\n"


def test_a_line_without_an_end_waits_for_it() -> None:
    out = io.BytesIO()
    relay = Relay("[a]", out)
    relay.feed(b"loss 0.")
    assert out.getvalue() == b""
    relay.feed(b"5\n")
    assert out.getvalue() == b"[a] loss 0.5\n"


def test_a_progress_bar_is_shown_once_a_second_and_as_it_was_left() -> None:
    now = iter(float(i) / 4 for i in range(1000))
    bar = [f"\r{i}%".encode() for i in range(101)]
    lines = relayed([*bar, b"\ndone\n"], clock=lambda: next(now))[0].splitlines()
    assert lines[-2:] == ["[a] 100%", "[a] done"]
    assert 2 < len(lines) < 40
    assert all(line.endswith("%") for line in lines[:-1])


def test_a_bar_drawn_and_overwritten_in_one_write_shows_its_last_state() -> None:
    assert relayed([b"\r 1%\r 2%\r 3%\n"])[0] == "[a]  3%\n"


def test_without_prefix_bytes_pass_unchanged() -> None:
    pieces = [b"\r 1%", b"\r 2%\xff", b"\nend"]
    out = io.BytesIO()
    relay = Relay(None, out)
    for piece in pieces:
        relay.feed(piece)
    relay.finish()
    assert out.getvalue() == b"".join(pieces)


def test_a_line_that_never_ends_is_passed_on_in_pieces() -> None:
    out = io.BytesIO()
    relay = Relay("[a]", out)
    for _ in range(3):
        relay.feed(b"x" * MAX_LINE_BYTES)
    assert out.getvalue().count(b"x") >= 2 * MAX_LINE_BYTES


@pytest.mark.parametrize("prefix", ["[a]", None])
def test_the_last_line_is_remembered_without_colours_and_blanks(prefix: str | None) -> None:
    assert relayed([b"first\n\x1b[31mErr", b"or: x\x1b[0m\n\n  \n"], prefix)[1].words.line == "Error: x"
    assert relayed([b"first\nno end"], prefix)[1].words.line == "no end"
    assert len(relayed([b"y" * 10_000 + b"\n"], prefix)[1].words.line) < 500


def test_bytes_that_are_no_utf_8_pass() -> None:
    out = io.BytesIO()
    Relay("[a]", out).feed(b"\xff\xfe\n")
    assert out.getvalue() == b"[a] \xff\xfe\n"


def test_names_have_colours_of_their_own() -> None:
    assert len({coloured("[a]", i) for i in range(8)}) == 8


def noting(prefix: str | None = "[b]") -> tuple[NotingRelay, io.BytesIO, list[str]]:
    out, notes = io.BytesIO(), []  # type: ignore[var-annotated]
    return NotingRelay(prefix, out, notes.append), out, notes


def test_notes_for_the_launcher_are_not_passed_on_however_they_are_cut() -> None:
    whole = b"\x1epsgc hello\none\n\x1epsgc end\ntwo \x1epsgc is text here\nthree"
    for cut in range(len(whole)):
        relay, out, notes = noting()
        relay.feed(whole[:cut])
        relay.feed(whole[cut:])
        relay.finish()
        assert notes == ["hello", "end"]
        assert out.getvalue() == b"[b] one\n[b] two \x1epsgc is text here\n[b] three\n"


def test_what_ssh_says_of_a_connection_that_does_not_come_about_is_kept_for_the_launchers_own_line() -> None:
    relay, out, _ = noting()
    relay.feed(b"banner\nssh: connect to host b port 22: Connection refused\n")
    relay.finish()
    assert (out.getvalue(), relay.words.line) == (b"", "ssh: connect to host b port 22: Connection refused")


def test_what_came_before_the_first_note_is_passed_on_after_it() -> None:
    relay, out, notes = noting(None)
    relay.feed(b"banner\n")
    relay.feed(b"\x1epsgc hello\nline\n")
    assert (out.getvalue(), notes) == (b"banner\nline\n", ["hello"])
