"""ps-lite's messages: what byteps 0.2.5.post15 sent is read field by field and packed again to the same bytes, and no other bytes do any harm."""

from __future__ import annotations

import contextlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psgc.errors import LocalProtocolError, RemoteProtocolError
from psgc.pslite.meta import (
    EMPTY,
    META_BYTES,
    META_FIELDS,
    NEWER_META_BYTES,
    NEWER_NODE_BYTES,
    NODE_BYTES,
    NODE_FIELDS,
    Meta,
    Node,
    read_meta,
)
from psgc.pslite.nodes import identity, sender_of
from psgc.pslite.pairs import KVPairs

ROOT = Path(__file__).parents[2]
RECORDED: list[dict[str, Any]] = json.loads((ROOT / "tests/golden/pslite/messages.json").read_text())


def holes(fields: Any, size: int) -> list[int]:
    """Offsets of a structure that no field covers."""
    covered = {field.offset + i for field in fields for i in range(struct.calcsize(f"<{field.kind}"))}
    return [offset for offset in range(size) if offset not in covered]


def test_every_message_that_byteps_sent_is_read_as_its_fields_say_and_packed_to_the_same_bytes() -> None:
    names = [message["name"] for message in RECORDED]
    for kind in (
        "worker: ADD_NODE", "worker: BARRIER request", "worker: ACK", "worker: HEARTBEAT", "worker: push request cmd 0", "worker: push request cmd 3",
        "worker: pull request", "scheduler: ADD_NODE", "scheduler: BARRIER reply", "scheduler: HEARTBEAT", "server: push reply", "server: pull reply",
        "server: ACK",
    ):  # fmt: skip
        assert any(name.startswith(f"stock {kind}") for name in names), kind
    for message in RECORDED:
        frame = bytes.fromhex(message["meta"])
        meta = read_meta(frame)
        for name, value in message["fields"].items():
            assert getattr(meta, name) == value, (message["name"], name)
        assert list(meta.data_types) == message["data_types"]
        for node, listed in zip(meta.nodes, message["nodes"], strict=True):
            assert {name: getattr(node, name) for name in listed} == listed
        packed = bytearray(meta.pack())
        blank = bytearray(frame)
        for start in range(len(frame) - NODE_BYTES * len(meta.nodes), len(frame), NODE_BYTES):
            for offset in [*holes(NODE_FIELDS, NODE_BYTES), *range(84, 160)]:  # padding, and the endpoint's name, are as the memory was
                blank[start + offset] = 0
        assert packed == blank, message["name"]


def test_data_frames_that_byteps_sent_are_keys_values_and_lengths() -> None:
    found = {}
    for message in RECORDED:
        if message["data"]:
            frames = [memoryview(bytes.fromhex(part)) for part in message["data"]]
            pairs = KVPairs.of_frames(frames)
            found[message["name"].split(",")[0]] = pairs
            made, types = pairs.frames()
            assert [bytes(part) for part in made] == [bytes(part) for part in frames]
            assert list(types) == message["data_types"]
    assert all(pairs.keys == ((5 << 16) + 1,) for pairs in found.values())
    assert bytes(found["stock worker: push request cmd 3"].value()) == b"2 compressor_k 3 compressor_type topk"
    assert found["stock server: pull reply"].lens == (160,)


def test_senders_are_told_by_their_routing_ids() -> None:
    recorded = {message["identity"] for message in RECORDED}
    assert recorded == {"", "ps1", "ps8", "ps9"}
    assert [sender_of(identity(i)) for i in (1, 8, 9, 2047)] == [1, 8, 9, 2047]
    assert [sender_of(text) for text in (b"", b"ps", b"ps-1", b"ps9x", b"\0abcd", b"ps" + b"9" * 40)] == [EMPTY] * 6


ints = st.integers(-(1 << 31), (1 << 31) - 1)
longs = st.integers(0, (1 << 64) - 1)
listed_nodes = st.builds(
    lambda role, host, port, node_id, again, customer: Node(
        role=role, hostname=host, port=port, id=node_id, is_recovery=again, customer_id=customer
    ),
    st.integers(0, 2), st.from_regex(r"\A[a-z0-9.:-]{1,63}\Z"), st.integers(1, 65535), ints, st.booleans(), ints,
)  # fmt: skip
metas = st.builds(
    Meta, command=st.integers(0, 5), head=ints, body=st.binary(max_size=50), nodes=st.lists(listed_nodes, max_size=3).map(tuple),
    barrier_group=ints, signature=longs, request=st.booleans(), app_id=ints, timestamp=ints, data_types=st.lists(ints, max_size=3).map(tuple),
    customer_id=ints, push=st.booleans(), data_size=ints, key=longs, addr=longs, val_len=ints, option=ints,
)  # fmt: skip


@given(metas)
@settings(max_examples=30)
def test_every_message_comes_back_the_same(meta: Meta) -> None:
    frame = meta.pack()
    assert len(frame) == META_BYTES + len(meta.body) + 4 * len(meta.data_types) + NODE_BYTES * len(meta.nodes)
    assert read_meta(frame) == meta


@given(st.one_of(st.binary(max_size=700), st.tuples(metas, st.integers(0, 300), st.binary(min_size=1, max_size=8))))
def test_any_bytes_are_a_message_or_refused_and_nothing_else(made: Any) -> None:
    """Flipped, cut and foreign bytes alike: the reader raises one kind of error and never reads beyond the frame."""
    if isinstance(made, tuple):
        meta, at, wrong = made
        whole = bytearray(meta.pack())
        whole[at : at + len(wrong)] = wrong
        made = bytes(whole)
    with contextlib.suppress(RemoteProtocolError):
        read_meta(made)


def test_messages_of_a_newer_ps_lite_are_refused_with_the_reason() -> None:
    for frames, listed in ((0, 0), (3, 0), (0, 1)):
        newer = bytearray(NEWER_META_BYTES + 4 * frames + NEWER_NODE_BYTES * listed)
        struct.pack_into("<i", newer, 44, frames)
        struct.pack_into("<i", newer, 12, listed)
        with pytest.raises(RemoteProtocolError, match=r"newer ps-lite .* byteps 0\.2\.5\.post15: run this version"):
            read_meta(bytes(newer))


def test_what_no_message_can_be_is_refused_with_what_came_and_what_was_expected() -> None:
    plain = bytearray(Meta(head=0).pack())
    for offset, value, said in (
        (4, -1, "a body of -1 bytes"), (12, 5000, "5000 nodes"), (44, 4, "4 data frames"), (8, 9, "control command 9; expected 0 to 5"),
        (4, 7, "a ps-lite message of 88 bytes announces 95"),
    ):  # fmt: skip
        wrong = bytearray(plain)
        struct.pack_into("<i", wrong, offset, value)
        with pytest.raises(RemoteProtocolError, match=re.escape(said)):
            read_meta(wrong)
    with pytest.raises(RemoteProtocolError, match="87 bytes; expected 88 at least"):
        read_meta(plain[:-1])
    plain[53] = 1
    with pytest.raises(RemoteProtocolError, match="SimpleApp"):
        read_meta(plain)
    with pytest.raises(LocalProtocolError):
        Meta(head=1 << 40).pack()


def test_keys_values_and_lengths_that_do_not_fit_are_refused() -> None:
    key = memoryview(b"\1" * 8)
    for frames in ([key], [key[:7], key], [memoryview(b""), key], [key, key, memoryview(b"123")], [key, key, memoryview(b"\1\0\0\0" * 2)],
                   [key, key, memoryview(b"\xff\xff\xff\xff")]):  # fmt: skip
        with pytest.raises(RemoteProtocolError):
            KVPairs.of_frames(frames)
    with pytest.raises(RemoteProtocolError, match="lengths that add up to 7"):
        KVPairs.of_frames([key, key, memoryview(b"\7\0\0\0")]).value()
    with pytest.raises(RemoteProtocolError):
        KVPairs((1, 2), memoryview(b"123")).value()


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_data_frames_are_pairs_or_refused(frames: list[bytes]) -> None:
    with contextlib.suppress(RemoteProtocolError):
        pairs = KVPairs.of_frames([memoryview(frame) for frame in frames])
        for index in range(len(pairs.keys)):
            assert len(pairs.value(index)) <= len(pairs.vals)


def test_the_page_shows_the_tables_of_the_code() -> None:
    page = (ROOT / "docs/pslite.md").read_text()
    for field in (*META_FIELDS, *NODE_FIELDS):
        row = f"| {field.offset} | `{field.name}` | "
        assert row in page, row
        assert field.meaning in page
