"""Grouped push_pull, BytePS's counter of it, priorities and versions of calls, and get_pushpull_speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import psgc.torch as psgc
from psgc.config import Config
from psgc.errors import UsageError
from psgc.layout import BucketSpec, Declaration, TensorSpec, build_layout
from psgc.server.window import OPEN
from psgc.torch.session import speed
from psgc.torch.session.speed import NOTHING, Windows
from psgc.wire.frames import SERVER_SENDER, Header, Kind
from psgc.worker.client import Client, Transmit


def test_a_group_is_summed_in_fused_pieces_whatever_its_shapes_and_dtypes(ranks: Any) -> None:
    tensors = [
        torch.tensor(2.0),
        torch.empty(0),
        torch.arange(5.0),
        torch.tensor([7, 8], dtype=torch.int8),
        torch.tensor([1.5], dtype=torch.float64),
    ]

    def work(rank: int) -> list[list[float]]:
        given = [t * (1 + rank) for t in tensors]
        for _ in range(2):
            results = psgc.push_pull_group(given, average=False, name="g")
        assert torch.equal(given[2], tensors[2] * (1 + rank)) and [t.dtype for t in results] == [t.dtype for t in tensors]
        return [t.reshape(-1).tolist() for t in results]

    want = [(3 * t).reshape(-1).tolist() for t in tensors]
    assert ranks.run(2, work) == [want, want]
    assert len([s for s in ranks.steps if s.layout == "push_pull_group.g"]) == 2 * 3  # one bucket for each dtype


def test_a_groups_name_belongs_to_its_tensors(ranks: Any) -> None:
    def work(_: int) -> None:
        psgc.push_pull_group([torch.ones(2)], name="g")
        with pytest.raises(UsageError, match=r"'push_pull_group\.g' was of 1 other tensors before"):
            psgc.push_pull_group([torch.ones(3)], name="g")
        assert psgc.push_pull_group([]) == []

    ranks.run(1, work)


def test_bytepss_counter_tells_when_all_gradients_are_under_way(ranks: Any) -> None:
    def work(rank: int) -> None:
        with pytest.raises(UsageError, match="call set_num_grads"):
            psgc.push_pull_group_sync_inplace(torch.ones(1), name="a")
        psgc.set_num_grads(2)
        for _ in range(2):
            x, y = torch.full((2,), 1.0 + rank), torch.full((3,), 3.0 + rank)
            (first, one), (second, two) = psgc.push_pull_group_sync_inplace(x, name="a"), psgc.push_pull_group_sync_inplace(y, name="b")
            assert (one, two) == (1, 2)
            assert psgc.synchronize(first).tolist() == [1.5] * 2 and psgc.synchronize(second).tolist() == [3.5] * 3

    ranks.run(2, work)


def test_priorities_of_calls_reach_the_session_and_versions_must_rise(ranks: Any) -> None:
    def work(_: int) -> None:
        psgc.push_pull(torch.ones(1), name="a", version=1, priority=-3)
        psgc.push_pull(torch.ones(1), name="a", version=5, priority=4)
        psgc.push_pull(torch.ones(1), name="a")
        for version in (5, 2):
            with pytest.raises(UsageError, match=rf"'a': version {version} after version 5 would be summed twice"):
                psgc.push_pull(torch.ones(1), name="a", version=version)
        with pytest.raises(UsageError, match="version is -1"):
            psgc.push_pull(torch.ones(1), name="a", version=-1)
        with pytest.raises(UsageError, match="priority is 4294967296"):
            psgc.push_pull(torch.ones(1), name="a", priority=1 << 32)

    ranks.run(1, work)
    assert ranks.sessions[0].priorities == [-3, 4, 0]


def test_of_what_waits_the_highest_priority_of_its_call_is_sent_first() -> None:
    specs = tuple(TensorSpec(f"t{i}", (2,), "float32") for i in range(4))
    declaration = Declaration("m", "adhoc", specs, "none", True, buckets=tuple(BucketSpec((i,), "none", 0) for i in range(4)))
    layout = build_layout(declaration, layout_id=0, servers=1, workers=1)
    keys = [bucket.parts[0].key for bucket in layout.buckets]
    client = Client(0, 0, 0, 1)
    client.add_layout(layout, dict.fromkeys(keys, 1))
    client.receive(0, Header(Kind.WINDOW, sender=SERVER_SENDER, step=OPEN), None, 0.0)
    for key, priority in zip(keys, (1, 9, -2, 5), strict=True):
        client.prioritise([key], priority)
        client.submit(key, 0.0, 8)
    sent = [action.header.key for action in client.connected(0, 0.0) if isinstance(action, Transmit) and action.payload]
    assert sent == [keys[1], keys[3], keys[0], keys[2]]


def test_speed_is_told_of_windows_of_ten_seconds_the_oldest_first() -> None:
    windows = Windows(100.0)
    windows.look(109.9, 5_000_000, 1)
    assert windows.take() == NOTHING
    windows.look(110.0, 20_000_000, 2)
    windows.look(130.0, 30_000_000, 3)
    assert [windows.take() for _ in range(3)] == [(2, 2.0), (3, 0.5), NOTHING]


@pytest.mark.usefixtures("alone")
def test_speed_without_a_window_is_bytepss_nothing() -> None:
    assert psgc.get_pushpull_speed() == (0, -5.0)


@pytest.mark.usefixtures("alone")
def test_without_telemetry_no_window_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    session = psgc.current_session()
    psgc.get_pushpull_speed()
    speed._windows[session].over.append((1, 2.0))
    monkeypatch.setattr(session, "config", Config.from_env({"BYTEPS_TELEMETRY_ON": "0"}))
    assert psgc.get_pushpull_speed() == NOTHING
    monkeypatch.setattr(session, "config", Config.from_env({"BYTEPS_TELEMETRY_ON": "1"}))
    assert psgc.get_pushpull_speed() == (1, 2.0)
