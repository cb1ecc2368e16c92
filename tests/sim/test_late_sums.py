"""A key whose steps do not wait for every rank, with its real memory and its real sums: whoever is late and whenever the server's process ends, every
contribution is in exactly one result.

The state machine, the engine and the store of one key; ranks push whenever they may, in an order that follows from a seed, and overwrite a payload as soon as
its result has come."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from psgc.codecs import CodecPair, Stream, parse_codec
from psgc.errors import RemoteProtocolError
from psgc.layout import make_key
from psgc.server.engine import Engine, KeyWork
from psgc.server.late import LOOKED_AT, HeldUp, Late, Owed
from psgc.server.step import NO_SLOT, Action, Commit, Fold, KeepLate, KeySpec, KeyState, Reply, Result
from psgc.server.store import KeyShape, Store
from psgc.wire.frames import Flag, Header, Kind
from psgc.wire.messages import ErrorCode

KEY = make_key(1, 0, 0)
NUMEL = 67


class Play:
    """units: by step, the unit of its contributions and of its result; gradients: by step and rank, in the unit of 1."""

    def __init__(
        self, seed: int, workers: int, backup: int, steps: int, codec: str = "none", units: bool = False, crashes: float = 0.0
    ) -> None:
        self.rng = random.Random(seed)
        self.workers, self.steps, self.crashes = workers, steps, crashes
        self.codec = parse_codec(codec)
        numbers = np.random.default_rng(seed)
        self.gradients = numbers.integers(-1000, 1000, (steps, workers, NUMEL)).astype(np.float32)
        self.units = [2.0 ** self.rng.randint(-3, 3) if units else 1.0 for _ in range(steps)]
        self.spec = KeySpec(
            KEY, NUMEL, range(workers), self.codec.codec_id, self.codec.codec_id, pull_feedback=self.codec.feedback, backup=backup
        )
        self.shape = KeyShape(
            KEY, self.codec.payload_bound(NUMEL), NUMEL if self.codec.feedback else 0, backup, self.codec.payload_bound(NUMEL)
        )
        self.work = KeyWork(self.spec, CodecPair(self.codec, self.codec), 0, 0, False)
        self.engine = Engine(1, lambda _: None, lambda _: None)
        self.slots = np.zeros((workers, self.codec.payload_bound(NUMEL)), np.uint8)  # each rank's memory for payloads
        self.sizes = [0] * workers
        self.pushed = np.zeros((steps, workers, NUMEL), np.float32)  # decoded
        self.done = [0] * workers  # steps whose result has come
        self.waits = [False] * workers
        self.results: dict[int, Any] = {}
        self.folds: list[Fold] = []
        self.late = self.kept = 0
        self.store = Store()
        self.begin()

    def begin(self, former: Store | None = None) -> None:
        """A process of the server begins, where a former one has ended."""
        self.store = Store(()) if former is None else Store([segment for _, segment in sorted(former.segments.items())])
        self.store.add_keys([self.shape])
        self.state = KeyState(self.spec)
        self.folds = []
        if former is not None:
            self.state.take_up(self.store.keys[KEY].kept)

    def run(self) -> Play:
        while min(self.done) < self.steps:
            ready = [rank for rank in range(self.workers) if not self.waits[rank] and self.done[rank] < self.steps]
            moves: list[Any] = [*ready, *(["fold"] if self.folds else [])]
            move = self.rng.choice(moves)
            if self.rng.random() < self.crashes:
                self.crash()
            elif move == "fold":
                self.fold()
            else:
                self.encode(move)
                self.push(move)
        self.engine.close()
        return self

    def encode(self, rank: int) -> None:
        step = self.done[rank]
        self.slots[rank] = 0xFF
        scaled = self.gradients[step, rank] * np.float32(self.units[step])
        self.sizes[rank] = self.codec.encode(scaled, None, 1.0, Stream(0, step, rank, 0), self.slots[rank]).payload_bytes
        self.codec.decode(self.slots[rank][: self.sizes[rank]], NUMEL, 0, NUMEL, self.pushed[step, rank])

    def push(self, rank: int) -> None:
        self.waits[rank] = True
        step, payload = self.done[rank], self.slots[rank][: self.sizes[rank]]
        rescale = self.units[step] / self.units[step - 1] if step else 1.0
        header = Header(
            Kind.PUSH, Flag.WANT_RESULT, key=KEY, step=step + 1, sender=rank, codec=self.codec.codec_id, rescale=rescale, payload_bytes=len(payload)
        )  # fmt: skip
        self.late += self.state.late is not None and self.state.late.owes(rank)
        self.carry_out(self.state.contribute(rank, header, payload))

    def fold(self) -> None:
        fold = self.folds.pop()
        self.carry_out(self.state.folded(*self.engine.run(fold, self.work, self.store.keys[KEY])[1:]))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Fold):
                self.folds.append(action)
            elif isinstance(action, Commit):
                self.store.keys[KEY].commit(action)
            elif isinstance(action, KeepLate):
                self.kept += 1
                self.store.keys[KEY].keep_late(action)
            elif isinstance(action, Reply) and action.result is not None:
                self.take(action.rank, action.result)
            if self.rng.random() < self.crashes / 4:
                self.crash()
                return

    def take(self, rank: int, result: Result) -> None:
        """The rank gets a result; from now on its payload may be overwritten."""
        if result.step != self.done[rank] + 1:
            return  # once more, after its connection was made again
        assert result.slot != NO_SLOT
        got = np.empty(NUMEL, np.float32)
        self.codec.decode(self.store.keys[KEY].result(result.slot)[: result.payload_bytes], NUMEL, 0, NUMEL, got)
        np.testing.assert_array_equal(self.results.setdefault(result.step, got), got)
        self.done[rank], self.waits[rank] = result.step, False
        self.slots[rank] = 0xFF

    def crash(self) -> None:
        former = self.store
        self.begin(former)
        waiting = [rank for rank in range(self.workers) if self.waits[rank]]
        self.rng.shuffle(waiting)
        for rank in waiting:
            if self.waits[rank]:  # and no crash meanwhile has had it asked
                self.ask(rank)

    def ask(self, rank: int) -> None:
        try:
            self.carry_out(self.state.pull(rank, self.done[rank] + 1))
        except RemoteProtocolError as error:
            if error.code != ErrorCode.PUSH_MISSING:
                raise
            self.push(rank)

    def sum_of_results(self) -> Any:
        return sum(self.results[step + 1] / np.float32(self.units[step]) for step in range(self.steps))

    def left(self) -> Any:
        """What has come too late for the last step's sum."""
        late = self.state.late
        ranks = [] if late is None else [owed.rank for owed in late.owed]
        return sum((self.pushed[-1, rank] / np.float32(self.units[-1]) for rank in ranks), np.zeros(NUMEL, np.float32))


@pytest.mark.parametrize("crashes", [0.0, 0.05], ids=["one process", "many processes"])
@pytest.mark.parametrize("units", [False, True], ids=["one unit", "units"])
@pytest.mark.parametrize(("workers", "backup"), [(2, 1), (4, 1), (4, 3), (9, 2), (12, 10)])
def test_all_results_together_are_all_contributions_to_the_last_bit(workers: int, backup: int, units: bool, crashes: float) -> None:
    late = 0
    for seed in range(12):
        play = Play(seed, workers, backup, 12, units=units, crashes=crashes).run()
        np.testing.assert_array_equal(play.sum_of_results() + play.left(), play.gradients.sum((0, 1)))
        late += play.late
    assert late > 12


def test_without_backup_the_same_play_waits_for_everybody() -> None:
    play = Play(0, 4, 0, 12, crashes=0.05).run()
    assert play.late == play.kept == 0
    for step in range(12):
        np.testing.assert_array_equal(play.results[step + 1], play.gradients[step].sum(0))


@pytest.mark.parametrize("codec", ["onebit", "int8", "topk:k=0.2"])
def test_what_a_server_leaves_out_of_its_answers_stays_in_its_residual_late_contributions_too(codec: str) -> None:
    for seed in range(6):
        play = Play(seed, 4, 1, 20, codec, crashes=0.03).run()
        residuals = play.store.keys[KEY].residuals()
        assert residuals is not None
        wanted = play.pushed.sum((0, 1))
        scale = np.abs(play.pushed).sum()
        np.testing.assert_allclose(play.sum_of_results() + residuals[0] + play.left(), wanted, atol=1e-6 * scale)


def test_a_late_contribution_is_copied_before_its_rank_may_overwrite_it_and_before_anybody_hears_that_it_came() -> None:
    state = KeyState(KeySpec(KEY, NUMEL, range(3), 0, 0, backup=1))
    push = Header(Kind.PUSH, Flag.WANT_RESULT, key=KEY, step=1, payload_bytes=8)
    state.contribute(0, push, b"0" * 8)
    (fold,) = [action for action in state.contribute(2, push, b"2" * 8) if isinstance(action, Fold)]
    assert fold.payloads == (b"0" * 8, b"2" * 8)
    state.folded(True, 8, False, fold.slot)
    assert state.step == 2, "closed without rank 1"
    keep, reply = state.contribute(1, push, b"1" * 8)
    assert isinstance(keep, KeepLate)
    assert isinstance(reply, Reply)
    assert (keep.payload, keep.commit.late.owed) == (b"1" * 8, (Owed(1, True, payload_bytes=8),))
    assert reply.header.kind == Kind.RESULT


def test_a_step_waits_for_what_the_last_one_was_closed_without_and_names_that_rank() -> None:
    state = KeyState(KeySpec(KEY, NUMEL, range(3), 0, 0, backup=1))
    for step in (1, 2):
        push = Header(Kind.PUSH, Flag.WANT_RESULT, key=KEY, step=step, payload_bytes=8)
        for rank in (0, 1):
            for action in state.contribute(rank, push, b"payload!"):
                if isinstance(action, Fold):
                    state.folded(True, 8, False, action.slot)
    assert state.step == 2
    assert state.awaited() == [2]
    with pytest.raises(RemoteProtocolError, match="before that to step 1"):
        state.contribute(2, push, b"payload!")
    (fold,) = [a for a in state.contribute(2, push._replace(step=1), b"payload!") if isinstance(a, Fold)]
    assert fold.late == (0,)
    assert state.late is not None
    assert state.late.held_up_by == 2
    assert state.awaited() == []


@pytest.mark.parametrize("before", [0, 1000])
def test_a_rank_is_named_after_as_many_steps_in_a_process_that_follows_at_a_later_one(before: int) -> None:
    held_up = HeldUp()
    due = []
    for step in range(before + 1, before + LOOKED_AT + 1):
        held_up.note(2 if step > before + 10 else -1, step)
        due += [(step - before, rank, share) for rank, share in held_up.due()]
    assert due == [(LOOKED_AT, 2, 0.8)]
    paused = HeldUp()
    paused.note(2, before + 1)
    assert paused.due() == [], "once"


def test_a_process_that_follows_knows_the_result_before_the_last_and_who_is_late() -> None:
    store = Store()
    shape = KeyShape(KEY, 8, 2, 3, 8)
    store.add_keys([shape])
    late = Late(3, [Owed(1, True, payload_bytes=5), Owed(4, True, skipped=True), Owed(7)], Result(6, Flag.NONE, 9, 1, 8))
    store.keys[KEY].commit(Commit(KEY, Result(6, Flag.NONE, 9, 1, 8), True))
    store.keys[KEY].commit(Commit(KEY, Result(7, Flag.NONFINITE, 8), False))
    store.keys[KEY].keep_late(KeepLate(0, b"12345", Commit(KEY, Result(7, Flag.NONFINITE, 8), False, late=late.kept)))
    again = Store([segment for _, segment in sorted(store.segments.items())])
    again.add_keys([shape])
    assert again.keys[KEY].kept == store.keys[KEY].kept
    assert again.keys[KEY].kept.late == late.kept
    assert again.keys[KEY].late_payload(0).tobytes() == b"12345"


def said(state: KeyState, rank: int, step: int, flags: Flag = Flag.NONE, skip: bool = False) -> list[Action]:
    """A rank's contribution; what the server folds for it is finite."""
    header = Header(Kind.SKIP if skip else Kind.PUSH, Flag.WANT_RESULT | flags, key=KEY, step=step, payload_bytes=0 if skip else 8)
    actions = state.contribute(rank, header, None if skip else b"payload!")
    for action in actions:
        if isinstance(action, Fold):
            actions = [*actions, *state.folded(action.last, 8, False, action.slot)]
    return actions


def results(actions: list[Action]) -> list[tuple[int, Result]]:
    return [(action.rank, action.result) for action in actions if isinstance(action, Reply) and action.result is not None]


def test_a_step_of_which_only_skips_have_come_waits_for_every_rank_and_names_those_that_it_waits_for() -> None:
    state = KeyState(KeySpec(KEY, NUMEL, range(4), 0, 0, backup=1))
    for rank in (0, 1, 2):
        assert results(said(state, rank, 1, skip=True)) == []
    assert state.awaited() == [3], "rank 3 may have a gradient, of which SKIPPED would say that there is none"
    assert sorted(rank for rank, _ in results(said(state, 3, 1))) == [0, 1, 2, 3]
    assert state.result is not None
    assert (state.result.flags, state.result.contributors) == (Flag.NONE, 1)
    for rank in (0, 1, 2):
        said(state, rank, 2, skip=True)
    assert [result.flags for _, result in results(said(state, 3, 2, skip=True))] == [Flag.SKIPPED] * 4


def test_what_came_late_is_enough_for_a_step_of_skips() -> None:
    state = KeyState(KeySpec(KEY, NUMEL, range(3), 0, 0, backup=1))
    said(state, 0, 1)
    said(state, 1, 1)
    said(state, 2, 1)  # late
    said(state, 0, 2, skip=True)
    assert sorted(rank for rank, _ in results(said(state, 1, 2, skip=True))) == [0, 1]


def test_what_comes_late_for_a_step_that_was_not_finite_counts_as_a_skip() -> None:
    state = KeyState(KeySpec(KEY, NUMEL, range(3), 0, 0, backup=1))
    said(state, 0, 1, Flag.NONFINITE)
    said(state, 1, 1)
    keep, reply = said(state, 2, 1)
    assert isinstance(keep, KeepLate)
    assert isinstance(reply, Reply)
    assert (keep.payload, keep.commit.late.owed) == (None, (Owed(2, True, skipped=True),))
    assert reply.header.flags == Flag.NONFINITE
    said(state, 0, 2)
    assert results(said(state, 1, 2))[0][1].contributors == 2


@pytest.mark.parametrize("gives_back", [False, True])
def test_what_comes_late_for_a_step_that_the_trainer_drops_is_dropped_unless_the_server_gives_that_step_back(gives_back: bool) -> None:
    state = KeyState(KeySpec(KEY, NUMEL, range(3), 0, 0, pull_feedback=gives_back, backup=1))
    said(state, 0, 1)
    said(state, 1, 1)
    said(state, 2, 1)  # late
    said(state, 0, 2, Flag.PREVIOUS_SKIPPED)
    said(state, 1, 2, Flag.PREVIOUS_SKIPPED)
    assert state.result is not None
    assert (state.result.step, state.result.contributors) == (2, 2 + gives_back)
