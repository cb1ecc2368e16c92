"""PROTOCOL.md says what the code does: each of its tables is the code's."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from psgc.layout import Bucket, BucketSpec, Declaration, Layout, Part, TensorSpec
from psgc.transport.security.handshake import ANSWER_FIELDS, CHALLENGE_FIELDS, WELCOME_FIELDS
from psgc.wire import messages, reports
from psgc.wire.frames import FIELDS, Flag, Kind
from psgc.wire.messages import ErrorCode

PROTOCOL = (Path(messages.__file__).parent / "PROTOCOL.md").read_text()
BODIES = (
    messages.Register, messages.Topology, messages.ServerAddress, messages.Notice, messages.Lookup, messages.Published, messages.Declare, Declaration,
    TensorSpec, BucketSpec, Layout,
    Bucket, Part, reports.Report, reports.ReportOf, reports.Observed, reports.Event,
)  # fmt: skip


def table(title: str) -> list[list[str]]:
    """Rows of the first table under a heading, without its head."""
    section = PROTOCOL.split(f"### {title}\n")[1].split("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_header_table_is_the_codes() -> None:
    def rows() -> Iterator[list[str]]:
        offset = 0
        for name, code, meaning in FIELDS:
            yield [str(offset), code, name, meaning]
            offset += struct.calcsize("<" + code)

    assert table("Header") == list(rows())


@pytest.mark.parametrize(
    ("title", "rows"), [("Challenge", CHALLENGE_FIELDS), ("Answer", ANSWER_FIELDS), ("Welcome", WELCOME_FIELDS)]
)  # fmt: skip
def test_the_tables_of_the_handshake_are_the_codes(title: str, rows: Any) -> None:
    offsets = [struct.calcsize("<" + "".join(code for _, code, _ in rows[:index])) for index in range(len(rows))]
    assert table(title) == [[str(offset), code, name, meaning] for offset, (name, code, meaning) in zip(offsets, rows, strict=True)]


@pytest.mark.parametrize(("title", "enum"), [("Kinds", Kind), ("Flags", Flag), ("Error codes", ErrorCode)])
def test_the_tables_of_numbers_are_the_codes(title: str, enum: Any) -> None:
    wanted = [[str(int(member)), member.name] for member in enum if int(member)]
    assert [row[:2] for row in table(title)] == wanted
    assert all(row[-1] for row in table(title)), "each has a meaning"


def test_the_table_of_bodies_is_the_codes() -> None:
    wanted = [[body.__name__, field.name, str(field.type)] for body in BODIES for field in fields(body)]
    assert [row[:3] for row in table("Bodies")] == wanted
    assert all(row[3] for row in table("Bodies"))


def test_every_body_named_in_the_table_of_kinds_is_described() -> None:
    described = {row[0] for row in table("Bodies")}
    named = {word for row in table("Kinds") for word in row[3].split() if word[0].isupper()}
    assert named <= described
