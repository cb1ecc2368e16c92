"""BytePS's server, without sockets: who is answered when, with which sum. The requests are those that byteps's worker was seen to send."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psgc.errors import RemoteProtocolError, UsageError
from psgc.layout.byteps_hash import HashPlacement
from psgc.layout.machines import Machines
from psgc.pslite.byteps.commands import DTYPES, PUSH_PULL, REGISTER, aligned_bytes, command, parse_command, part_bound, parts_of
from psgc.pslite.byteps.registration import Registration
from psgc.pslite.byteps.store import MAX_ROUNDS_AHEAD, Answer, Store
from psgc.pslite.nodes import key_ranges
from psgc.pslite.pairs import KVMeta, KVPairs

OWN = key_ranges(2)[1]
KEY = OWN.start + (5 << 16) + 1


class Workers:
    """Asks a store as BytePS's workers do; what was answered is kept by worker."""

    def __init__(self, *ids: int) -> None:
        self.store = Store(ids, OWN)
        self.answered: dict[int, list[Any]] = {worker: [] for worker in ids}
        self._timestamp = 0

    def ask(self, worker: int, push: bool, value: bytes = b"", cmd: int = 0, key: int = KEY) -> None:
        self._timestamp += 1
        meta = KVMeta(cmd, push, worker, self._timestamp, 0)
        pairs = KVPairs((key,), memoryview(value), (len(value),) if push else ())
        self._take(self.store.handle(meta, pairs, 0.0))

    def _take(self, answers: list[Answer]) -> None:
        for meta, pairs in answers:
            self.answered[meta.sender].append(np.frombuffer(pairs.vals, np.float32).tolist() if pairs.keys else meta.timestamp)

    def begin(self, *values: float) -> None:
        for worker in self.answered:
            self.ask(worker, True, np.array(values or [0.0], np.float32).tobytes())
        for came in self.answered.values():
            came.clear()

    def push(self, worker: int, *values: float) -> None:
        self.ask(worker, True, np.array(values, np.float32).tobytes())

    def pulled(self, worker: int) -> list[list[float]]:
        return [answer for answer in self.answered[worker] if isinstance(answer, list)]


def test_the_first_push_of_a_key_is_answered_when_all_workers_have_sent_theirs() -> None:
    workers = Workers(9, 11)
    workers.ask(11, True, b"\0" * 8)
    assert workers.answered == {9: [], 11: []}
    workers.ask(9, True, b"\0" * 8)
    assert workers.answered == {9: [2], 11: [1]}
    workers.ask(9, True, b"2 compressor_k 1 compressor_type topk", command(REGISTER, "float32"))
    assert workers.answered[9] == [2]
    workers.ask(11, True, b"2 compressor_type topk compressor_k 1", command(REGISTER, "float32"))
    assert workers.answered == {9: [2, 3], 11: [1, 4]}


def test_a_quick_workers_next_push_leaves_the_sum_that_a_slow_one_has_yet_to_pull() -> None:
    """BytePS's own server answers 2 to the slow worker here: the other's next gradient."""
    workers = Workers(9, 11)
    workers.begin()
    workers.push(9, 1.0)
    workers.push(11, 10.0)
    workers.ask(9, False)
    workers.push(9, 2.0)
    workers.ask(11, False)
    assert workers.pulled(9) == workers.pulled(11) == [[11.0]]
    workers.ask(9, False)
    workers.push(11, 20.0)
    workers.ask(11, False)
    assert workers.pulled(9) == workers.pulled(11) == [[11.0], [22.0]]
    assert not workers.store._keys[KEY].rounds, "nothing is kept of rounds that all have pulled"


@given(st.integers(1, 4), st.integers(1, 12), st.sampled_from([None, "onebit", "randomk"]), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_every_pull_is_answered_with_its_own_rounds_sum_however_requests_interleave(
    ranks: int, steps: int, kind: str | None, chance: random.Random
) -> None:
    ids = [9 + 2 * rank for rank in range(ranks)]
    workers = Workers(*ids)
    workers.begin(*[0.0] * 4)
    if kind:
        text = {
            "onebit": b"2 compressor_type onebit compressor_onebit_scaling true",
            "randomk": b"3 compressor_type randomk compressor_k 2 seed 3",
        }[kind]
        for worker in ids:
            workers.ask(worker, True, text, command(REGISTER, "float32"))
    rng = np.random.default_rng(chance.randrange(1000))
    values = rng.integers(-9, 9, (steps, ranks, 4)).astype(np.float32)
    encoders = {worker: Registration.parse(text).compressor(4) for worker in ids} if kind else {}
    server = Registration.parse(text).compressor(4) if kind else None
    payloads = [
        [(encoders[w].encode(values[t, r].copy()) if kind else values[t, r].tobytes()) for r, w in enumerate(ids)] for t in range(steps)
    ]
    wanted = []
    for step in payloads:
        total = np.zeros(4, np.float32)
        for payload in step:
            total = total + (server.decode(payload) if server else np.frombuffer(payload, np.float32))
        wanted.append(np.frombuffer(server.encode(total), np.uint8 if server else np.float32).tobytes() if server else total.tobytes())
    progress, got = dict.fromkeys(ids, 0), {worker: [] for worker in ids}

    def keep(answers: list[Answer]) -> None:
        for meta, pairs in answers:
            if pairs.keys:
                got[meta.sender].append(bytes(pairs.vals))

    workers._take = keep  # type: ignore[method-assign]
    while any(count < 2 * steps for count in progress.values()):
        worker = chance.choice([w for w in ids if progress[w] < 2 * steps and (progress[w] % 2 or len(got[w]) == progress[w] // 2)])
        step, pulls = divmod(progress[worker], 2)
        workers.ask(worker, not pulls, b"" if pulls else payloads[step][ids.index(worker)])
        progress[worker] += 1
    assert all(got[worker] == wanted for worker in ids)


def test_sums_are_in_the_order_of_workers_in_every_dtype_of_byteps() -> None:
    for dtype in DTYPES:
        rng = np.random.default_rng(3)
        values = (rng.normal(size=(3, 50)) * 40).astype(dtype)
        wanted = (values[0] + values[1]) + values[2]
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            store = Store((9, 11, 13), OWN)
            got: list[Any] = []
            for rank in (0, 1, 2):
                store.handle(
                    KVMeta(command(PUSH_PULL, dtype), True, 9 + 2 * rank, 0, 0), KVPairs((KEY,), memoryview(values[0].tobytes())), 0.0
                )
            for rank in order:
                head = command(PUSH_PULL, dtype)
                got += store.handle(KVMeta(head, True, 9 + 2 * rank, 1, 0), KVPairs((KEY,), memoryview(values[rank].tobytes())), 0.0)
                got += store.handle(KVMeta(head, False, 9 + 2 * rank, 2, 0), KVPairs((KEY,)), 0.0)
            got = [bytes(pairs.vals) for _, pairs in got if pairs.keys]
            assert len(got) == 3 and set(got) == {wanted.tobytes()}, dtype


def test_requests_that_no_worker_would_send_are_refused_naming_the_key_and_what_was_expected() -> None:
    three = np.zeros(3, np.float32).tobytes()
    cases: tuple[tuple[Any, str], ...] = (
        (lambda w: w.ask(9, False, key=KEY + 1), "a request of key 327682, which not all workers have pushed first"),
        (lambda w: w.ask(9, True, b"1234", key=7), "expected one key of"),
        (lambda w: w.ask(15, True, b"1234"), "node 15, which is no worker"),
        (lambda w: w.ask(9, True, b"1234", 1), "command 1; expected a push"),
        (lambda w: w.ask(9, True, b"12345", key=KEY + 1), "a first push of 5 bytes of float32; expected a multiple of 4"),
        (lambda w: w.ask(9, True, three), r"a push of 12 bytes of float32 to key 327681 \(tensor 5, part 1\), which has 4 bytes of float32"),
        (lambda w: w.ask(9, True, b"1234", command(PUSH_PULL, "int32")), "of int32 to key"),
        (lambda w: [w.push(9, 1.0) for _ in range(MAX_ROUNDS_AHEAD + 1)], "expected a pull of each push"),
        (lambda w: [w.ask(9, False) for _ in range(3)], "expected a push before each pull"),
        (lambda w: w.ask(9, True, b"nonsense", command(REGISTER, "float32")), "a compressor is registered as b'nonsense'"),
        (lambda w: [w.ask(i, True, t, command(REGISTER, "float32")) for i, t in ((9, b"1 compressor_type onebit"), (11, b"2 compressor_type onebit seed 3"))],
         "give all workers the same settings"),
    )  # fmt: skip
    for act, said in cases:
        workers = Workers(9, 11)
        workers.begin()
        with pytest.raises(RemoteProtocolError, match=said):
            act(workers)
    workers = Workers(9, 11)
    workers.ask(9, True, b"1234")
    with pytest.raises(
        RemoteProtocolError, match="is 12 bytes of float32 on worker 11, but 4 of float32 on worker 9; all workers must declare the same"
    ):
        workers.ask(11, True, three)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([9, 11, 13, -1]), st.booleans(), st.binary(max_size=12), st.integers(-2, 6), st.sampled_from([KEY, KEY + 1, 7])
        ),
        max_size=20,
    )
)
def test_any_requests_are_answered_or_refused_and_nothing_else(requests: list[tuple[int, bool, bytes, int, int]]) -> None:
    workers = Workers(9, 11)
    workers.begin()
    for worker, push, value, cmd, key in requests:
        with contextlib.suppress(RemoteProtocolError):
            workers.ask(worker, push, value, cmd, key)


def test_whom_a_round_waits_for_is_named() -> None:
    workers = Workers(9, 11)
    workers.ask(9, True, b"1234")
    assert workers.store.stalled(10.0, 5.0) == ["key 327681 (tensor 5, part 1) waits for the first push of worker 11"]
    workers.ask(11, True, b"1234")
    assert workers.store.stalled(10.0, 5.0) == []
    workers.push(11, 1.0)
    assert workers.store.stalled(10.0, 5.0) == ["key 327681 (tensor 5, part 1), round 0, waits for the push of worker 9"]


def test_commands_keys_and_parts_are_byteps_own() -> None:
    assert [command(PUSH_PULL, dtype) for dtype in DTYPES] == [0, 2, 5, 9, 14, 20, 27]
    assert command(REGISTER, "float32") == 3
    for request in (PUSH_PULL, REGISTER):
        for dtype in DTYPES:
            assert parse_command(command(request, dtype)) == (request, dtype)
    for head in (-1, 1, 1 << 30):
        with pytest.raises(RemoteProtocolError):
            parse_command(head)
    assert [aligned_bytes(size, "float32") for size in (1, 128, 129)] == [128, 128, 256]
    assert (part_bound(4_096_000), part_bound(1), part_bound(5000, 2)) == (4_096_000, 4096, 8192)
    machines = Machines.alone(2, 2)
    parts = parts_of(5, 10_000, 4096, HashPlacement(), machines)
    assert [(p.start, p.stop) for p in parts] == [(0, 4096), (4096, 8192), (8192, 10_000)]
    assert [p.key for p in parts] == [(5 << 16) + i for i in range(3)]
    assert all(p.wire_key - p.key == key_ranges(2)[p.server].start for p in parts)
    with pytest.raises(UsageError, match="raise BYTEPS_PARTITION_BYTES"):
        parts_of(0, 4096 * ((1 << 16) + 1), 4096, HashPlacement(), machines)
