"""Bodies: what is encoded is decoded the same, and no JSON, nor anything that is none, breaks the reader."""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.errors import RemoteProtocolError
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec, build_layout
from psgc.wire.messages import (
    MAX_VALUE_BYTES,
    MAX_VALUE_NAME,
    Declare,
    ErrorCode,
    Lookup,
    Notice,
    Published,
    Register,
    ServerAddress,
    Topology,
    address_fields,
    decode_body,
    decode_json,
    encode_body,
    pack,
)
from tests.cases import for_each

TEXT = st.text(max_size=20)
NUMBER = st.integers(-(2**63), 2**64)
PLAIN = {
    "str": TEXT,
    "int": NUMBER,
    "bool": st.booleans(),
    "tuple[str, ...]": st.lists(TEXT).map(tuple),
    "tuple[int, ...]": st.lists(NUMBER).map(tuple),
    "Literal['worker', 'server']": st.sampled_from(["worker", "server"]),
}


def records(cls: Any) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{f.name: PLAIN[f.type] for f in fields(cls)})


TOPOLOGIES = st.builds(
    Topology, NUMBER, NUMBER, NUMBER, st.lists(NUMBER).map(tuple), NUMBER, st.lists(records(ServerAddress)).map(tuple),
    st.lists(TEXT).map(tuple), TEXT, TEXT, NUMBER, NUMBER
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
DECLARED = Declaration(
    "m", "plan", (TensorSpec("a", (70000, 3), "float32"), TensorSpec("b", (), "int8", 1)), "none", True, order=(1, 0), used=(0,)
)
PLANNED = replace(DECLARED, buckets=(BucketSpec((1,), "none", -1, 1), BucketSpec((0,), "onebit/int8", 5, 3, 69632, (1, 0, 1))))
READERS = {
    "Register": lambda data: decode_body(Register, data),
    "Notice": lambda data: decode_body(Notice, data),
    "Declare": lambda data: decode_body(Declare, data),
    "Lookup": lambda data: decode_body(Lookup, data),
    "Published": lambda data: decode_body(Published, data),
    "Topology": lambda data: Topology.from_body(decode_json(data, "TOPOLOGY")),
    "Declaration": lambda data: Declaration.from_json(decode_json(data, "DECLARE")),
    "Layout": Layout.from_json,
}
RIGHT: dict[str, Any] = {
    "Register": Register("worker", "1", "h", "n", 1, 2, 1, 1),
    "Notice": Notice(1, "text"),
    "Declare": Declare("m", "0123", (1, 2)),
    "Lookup": Lookup("groups/0"),
    "Published": Published.of("groups/0", b"\0\xff" * 9),
    "Topology": Topology(0, 1, 1, (1,), 1, (ServerAddress(0, "h", "tcp://h:1", ""),), ("0.0@h",)),
    "Declaration": PLANNED,
    "Layout": build_layout(DECLARED, layout_id=3, servers=2, workers=2, used_by_all=frozenset({0, 1})),
}


def paths(value: Any) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *rest) for key, child in inner for rest in paths(child))]


@given(records(Register) | records(Notice))
def test_a_record_comes_back_the_same(record: Any) -> None:
    assert decode_body(type(record), memoryview(encode_body(record))) == record


def test_a_server_registers_one_address_of_each_transport_and_workers_hear_all_of_them() -> None:
    urls = ["shm://psgc/5/1/ab", "tcp://10.0.0.5:4000", "relay://x/1", "other://y"]
    for offered in (urls, urls[:2], urls[1:2]):
        register = Register("server", "1", "h", "n", 1, 2, 1, 1, **address_fields(offered))
        assert ("more" in json.loads(encode_body(register))) == (len(offered) == 4), "left out where there is no other transport"
        read = decode_body(Register, encode_body(register))
        address = ServerAddress(0, "h", read.address, read.local_address, read.more)
        assert address.by_transport == {url.partition(":")[0]: url for url in offered}
    assert (register.address, register.local_address) == ("tcp://10.0.0.5:4000", "")


@given(name=st.text(min_size=1, max_size=MAX_VALUE_NAME), value=st.binary(max_size=500) | st.just(bytes(MAX_VALUE_BYTES)))
def test_a_published_value_comes_back_the_same(name: str, value: bytes) -> None:
    read = decode_body(Published, pack(encode_body(Published.of(name, value))))
    assert (read.name, read.data) == (name, value)


@for_each(
    wrong=[
        {"name": ""},
        {"name": "n" * (MAX_VALUE_NAME + 1)},
        {"value": "AAA"},
        {"value": "A-_="},
        {"value": "é==="},
        {"value": "A" * 90_000},
    ]
)
def test_a_value_without_a_name_or_that_is_too_large_or_not_base64_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_body(Published, encode_body({"name": "n", "value": "AAAA"} | wrong))
    assert caught.value.code == ErrorCode.MALFORMED


@given(TOPOLOGIES)
def test_a_topology_comes_back_the_same(topology: Topology) -> None:
    assert READERS["Topology"](encode_body(topology)) == topology


@pytest.mark.parametrize("name", READERS)
def test_what_is_right_is_read(name: str) -> None:
    assert READERS[name](encode_body(RIGHT[name])) == RIGHT[name]


@pytest.mark.parametrize("name", READERS)
@given(data=st.binary(max_size=200) | JSON.map(encode_body))
def test_any_bytes_are_a_record_or_are_refused(name: str, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        READERS[name](data)
    assert caught.value.code == ErrorCode.MALFORMED


@pytest.mark.parametrize("name", READERS)
@given(data=st.data(), other=JSON)
def test_a_record_with_any_value_replaced_or_any_field_added_or_left_out_is_read_or_refused(
    name: str, data: st.DataObject, other: Any
) -> None:
    body = json.loads(encode_body(RIGHT[name]))
    *path, last = data.draw(st.sampled_from(paths(body)[1:]))
    holder = body
    for key in path:
        holder = holder[key]
    if data.draw(st.booleans()):
        holder[last] = other
    elif isinstance(holder, dict):
        del holder[last]
    else:
        holder.append(other)
    with contextlib.suppress(RemoteProtocolError):
        read = READERS[name](encode_body(body))
        assert READERS[name](encode_body(read)) == read


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, '"\\ud800"', "NaN", "", "\x00"])
def test_json_that_breaks_readers_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_json(text.encode(), "body")


BUCKET = {"tensors": [0], "codec": "none", "priority": 0, "parts": 1, "part_numel": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tensors": [{"name": "a", "shape": [1], "dtype": "complex64", "group": 0}]},
        {"tensors": [{"name": "a", "shape": [-1], "dtype": "float32", "group": 0}]},
        {"order": [0, 0]},
        {"order": [2]},
        {"used": [-1]},
        {"kind": "king"},
        {"part_bytes": 0},
        {"fuse_bytes": -1},
        {"root": -1},
        {"buckets": None},
        {"buckets": [{"tensors": [0], "codec": "none", "priority": 0, "parts": 1}]},
        {"buckets": [BUCKET | {"tensors": [2]}]},
        {"buckets": [BUCKET | {"tensors": []}]},
        {"buckets": [BUCKET, BUCKET]},
        {"buckets": [BUCKET | {"parts": -1}]},
        {"buckets": [BUCKET | {"part_numel": -4096}]},
        {"buckets": [BUCKET | {"priority": 1 << 31}]},
    ],
)
def test_a_declaration_that_no_rank_would_make_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        READERS["Declaration"](encode_body({**json.loads(encode_body(DECLARED)), **wrong}))
