"""What a server does without a rank whose process has died, told step by step (``server/step.py``, ``server/state.py``)."""

from __future__ import annotations

from typing import Any

import pytest

from psgc.errors import RemoteProtocolError
from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.processes.absence import Absence
from psgc.server.state import Close, Send, ServerState, specs_of
from psgc.server.step import Commit, Fold, KeySpec, KeyState, Reply
from psgc.wire.frames import SERVER_SENDER, Flag, Header, Kind
from psgc.wire.messages import ErrorCode, Notice, decode_body


def key(ranks: int, divisor: int | None = None, at_once: bool = False, **more: Any) -> KeyState:
    return KeyState(KeySpec(1, 100, range(ranks), 1, 1, ranks if divisor is None else divisor, at_once=at_once, **more))


def push(rank: int, step: int = 1) -> Header:
    return Header(Kind.PUSH, Flag.WANT_RESULT, key=1, step=step, codec=1, sender=rank, payload_bytes=4)


def skip(rank: int, step: int = 1) -> Header:
    return Header(Kind.SKIP, Flag.WANT_RESULT, key=1, step=step, codec=1, sender=rank)


def folds(actions: list[Any]) -> list[Fold]:
    return [action for action in actions if isinstance(action, Fold)]


def answered(actions: list[Any]) -> list[int]:
    return [action.rank for action in actions if isinstance(action, Reply) and action.header.kind == Kind.RESULT]


def test_a_step_that_awaits_a_dead_rank_is_taken_without_it_and_the_mean_is_of_the_others() -> None:
    state = key(3)
    assert not folds(state.contribute(0, push(0), "a")) + folds(state.contribute(2, push(2), "c"))
    (fold,) = folds(state.leave_out(1))
    assert (fold.payloads, fold.divisor, fold.last) == (("a", "c"), 2, True)
    assert answered(state.folded(True, 4, slot=0)) == [0, 2]
    assert state.awaited() == [] and not folds(state.contribute(0, push(0, 2), "a"))
    assert state.awaited() == [2]
    (fold,) = folds(state.contribute(2, push(2, 2), "c"))
    assert fold.divisor == 2, "and so is the next"
    state.folded(True, 4, slot=1)
    state.replaced(1)
    state.contribute(0, push(0, 3), "a")
    state.contribute(1, push(1, 3), "b")
    (fold,) = folds(state.contribute(2, push(2, 3), "c"))
    assert (fold.payloads, fold.divisor) == (("a", "b", "c"), 3), "but not the one that it takes part in"


def test_what_had_come_of_the_dead_rank_counts_in_that_step_and_a_sum_is_divided_by_nothing() -> None:
    for divisor, wanted in ((3, 3), (1, 1)):
        state = key(3, divisor)
        state.contribute(1, push(1), "b")
        assert state.leave_out(1) == []
        state.contribute(0, push(0), "a")
        (fold,) = folds(state.contribute(2, push(2), "c"))
        assert (fold.payloads, fold.divisor) == (("a", "b", "c"), wanted)
    state = key(3, 1)
    state.leave_out(1)
    state.contribute(0, push(0), "a")
    assert folds(state.contribute(2, push(2), "c"))[0].divisor == 1


def test_the_result_of_a_small_key_is_still_its_last_contributions_acknowledgement() -> None:
    state = key(3, at_once=True)
    state.leave_out(1)
    assert [action.header.kind for action in state.contribute(0, push(0), "a") if isinstance(action, Reply)] == [Kind.ACK]
    assert not [action for action in state.contribute(2, push(2), "c") if isinstance(action, Reply)]


def test_nothing_is_complete_of_which_nobody_has_contributed() -> None:
    state = key(2)
    assert state.leave_out(0) == [] and state.leave_out(1) == [] and state.step == 1


def test_a_rank_that_comes_back_is_awaited_in_the_step_under_way() -> None:
    state = key(3)
    state.leave_out(1)
    state.contribute(0, push(0), "a")
    state.replaced(1)
    assert not folds(state.contribute(2, push(2), "c")) and state.awaited() == [1]
    (fold,) = folds(state.contribute(1, push(1), "b"))
    assert (fold.payloads, fold.divisor) == (("a", "b", "c"), 3)


def behind_the_sum() -> KeyState:
    """Nine ranks in blocks of eight and one: the first block has been added without rank 1, which then comes back."""
    state = key(9)
    state.leave_out(1)
    for rank in (0, 2, 3, 4, 5, 6, 7):
        state.contribute(rank, push(rank), rank)
    assert state.folding
    assert state.folded(False) == []
    state.replaced(1)
    return state


def test_a_sum_that_is_past_a_rank_stays_as_it_is_but_awaits_it() -> None:
    state = behind_the_sum()
    assert not folds(state.contribute(8, push(8), 8)), "the result before this one is kept until rank 1 has come"
    assert state.awaited() == [1]
    with pytest.raises(RemoteProtocolError) as missing:
        state.pull(1, 1)
    assert missing.value.code == ErrorCode.PUSH_MISSING
    (fold,) = folds(state.contribute(1, push(1), "b"))
    assert (fold.payloads, fold.divisor, fold.last) == ((8,), 8, True)
    (commit,) = [action for action in state.folded(True, 4, slot=0) if isinstance(action, Commit)]
    assert commit.result.contributors == 8
    assert answered(state.pull(1, 1)) == [] and state.step == 2, "the result is queued on its connection already"


def test_what_it_then_repeats_is_not_added() -> None:
    state = behind_the_sum()
    state.contribute(1, push(1), "b")
    state.contribute(1, push(1), "b")
    assert [action.header.kind for action in state.pull(1, 1) if isinstance(action, Reply)] == [Kind.ACK]
    (fold,) = folds(state.contribute(8, push(8), 8))
    assert (fold.payloads, fold.divisor) == ((8,), 8)


def test_a_rank_that_dies_again_before_it_has_come_is_awaited_no_longer() -> None:
    state = behind_the_sum()
    state.contribute(8, push(8), 8)
    (fold,) = folds(state.leave_out(1))
    assert (fold.payloads, fold.divisor) == ((8,), 8)
    state = key(2)
    state.leave_out(1)
    state.replaced(1)
    state.contribute(0, push(0), "a")
    assert folds(state.leave_out(1))[0].divisor == 1


def test_a_rank_that_begins_with_the_step_before_hears_of_two_steps_that_are_without_it() -> None:
    """Ten ranks, of which the first block is gone; rank 8, which gives the state, has not taken the first result yet when rank 9 has, and skips, too."""
    state = key(10)
    for rank in range(8):
        state.leave_out(rank)
    for step in (1, 2):
        for rank in (8, 9)[step - 1 :]:
            state.contribute(rank, skip(rank, step), None)
    state.replaced(0)
    flags = [action.header.flags for action in state.contribute(0, push(0, 1), "a") if action.header.kind == Kind.RESULT]
    assert flags == [Flag.SKIPPED]
    assert answered(state.contribute(0, push(0, 2), "a")) == [] and state.awaited() == [8]
    assert answered(state.contribute(8, skip(8, 2), None)) == [0, 8, 9]
    assert state.result is not None and state.result.flags == Flag.SKIPPED, "rank 0's gradient is dropped"


def test_a_step_that_is_being_completed_without_a_rank_is_completed_without_it() -> None:
    state = key(2)
    state.contribute(0, push(0), "a")
    assert folds(state.leave_out(1))
    state.replaced(1)
    assert [action.header.kind for action in state.contribute(1, push(1), "b") if isinstance(action, Reply)] == [Kind.ACK]
    done = state.folded(True, 4, slot=0)
    (commit,) = [action for action in done if isinstance(action, Commit)]
    assert commit.result.contributors == 1 and answered(done) == [0, 1], "what comes meanwhile is not in the sum, and is answered"
    state.contribute(0, push(0, 2), "a")
    assert state.awaited() == [1]


def test_a_result_that_a_new_process_needs_and_that_is_gone_ends_the_job_with_a_line() -> None:
    """Of a name that was synchronised twice in the step of the training that a process takes again; a repeat of the process before is only late."""
    state = key(2)
    for step in (1, 2):
        state.contribute(0, push(0, step), "a")
        state.contribute(1, push(1, step), "b")
        state.folded(True, 4, slot=step % 2)
    assert [action.header.kind for action in state.contribute(1, push(1, 1), "b") if isinstance(action, Reply)] == [Kind.ACK]
    state.replaced(1)
    assert answered(state.contribute(1, push(1, 2), "b")) == [1]
    with pytest.raises(RemoteProtocolError, match=r"give what one step of .* synchronises several times a name each time") as gone:
        state.contribute(1, push(1, 1), "b")
    assert gone.value.code == ErrorCode.WRONG_STEP, "which a worker ends the job by"
    state.contribute(1, push(1, 3), "b")
    assert state.contribute(1, push(1, 1), "b"), "it has come to the step under way"


# a server

SPEC = (TensorSpec("x", (100,), "float32"),)


class Serving:
    """A server with a mean of three ranks, and whom it has said what."""

    def __init__(self, kind: str = "adhoc", root: int | None = None) -> None:
        self.state = ServerState(0, 3, 5, 1, step_timeout_s=1000)
        self.layout = build_layout(Declaration("x", kind, SPEC, "none", kind == "adhoc", root), layout_id=1, servers=1, workers=3)  # type: ignore[arg-type]
        self.state.register(self.layout, *specs_of(self.layout, 0, 3))
        (self.key,) = self.state.keys
        self.now = 0.0
        for rank in range(3):
            self.joins(rank)

    def joins(self, rank: int, incarnation: int = 0) -> list[Any]:
        self.state.proved(f"peer {rank} {incarnation}", rank)
        return self.says(rank, Kind.HELLO, incarnation, step=incarnation)

    def says(self, rank: int, kind: Kind, incarnation: int = 0, **fields: Any) -> list[Any]:
        return self.hears(f"peer {rank} {incarnation}", rank, kind, **fields)

    def hears(self, peer: str, rank: int, kind: Kind, **fields: Any) -> list[Any]:
        return self.state.receive(peer, Header(kind, job=5, epoch=1, sender=rank, **fields), None, self.now)

    def skips(self, rank: int, incarnation: int = 0, step: int = 1) -> list[Any]:
        return self.says(rank, Kind.SKIP, incarnation, flags=Flag.WANT_RESULT, plan=1, key=self.key, step=step)


def refused(effects: list[Any]) -> bool:
    send, *close = effects
    assert all(isinstance(effect, Close) and effect.peer == send.peer for effect in close)
    return isinstance(send, Send) and send.header.kind == Kind.ERROR and decode_body(Notice, send.body).code == ErrorCode.NOT_ADMITTED


def test_a_process_that_counts_as_dead_is_not_heard_any_more_and_the_next_one_is() -> None:
    serving = Serving()
    serving.state.leave_out(1, 1, 0.0)
    assert refused(serving.skips(1)) and refused(serving.joins(1)) and refused(serving.joins(1, 1)), "however it comes"
    serving.skips(0)
    assert [send.header.kind for send in serving.skips(2) if isinstance(send, Send)].count(Kind.RESULT) == 2
    (hello, *_) = serving.joins(1, 2)
    assert hello.header.kind == Kind.HELLO and hello.header.sender == SERVER_SENDER
    assert not refused(serving.skips(1, 2, 2)) and not serving.state.absent


def test_a_process_whose_place_another_has_taken_gets_neither_its_connection_nor_into_a_sum() -> None:
    """It was stopped, or cut off from the scheduler, which has not told it yet; its key is the rank's."""
    serving = Serving()
    serving.joins(1, 2)
    serving.skips(1, 2)
    assert serving.state.proved("the former process", 1) == []
    for kind in (Kind.PUSH, Kind.PULL, Kind.BYE):
        assert refused(serving.hears("the former process", 1, kind)), "nothing is heeded before HELLO"
    answer, close = serving.hears("the former process", 1, Kind.HELLO, step=0)
    assert refused([answer]) and isinstance(close, Close) and close.peer == "the former process"
    assert refused(serving.hears("the former process", 1, Kind.SKIP, plan=1, key=serving.key, step=1))
    assert serving.state.peers[1] == "peer 1 2", "its connection is as it was"
    assert list(serving.state.keys[serving.key].state.contributions) == [1] and not serving.state.departed


def test_a_step_that_awaits_a_new_process_is_late_from_its_hello_on() -> None:
    """It has to prepare, and to get the job's state."""
    serving = Serving()
    serving.state.absence = Absence(1e6)  # it ticks seldom here
    serving.skips(0)
    serving.now = 900.0
    serving.joins(1, 2)
    serving.skips(2)
    assert not serving.state.tick(1800.0)[1], "900 s of the limit of 1000"
    serving.now = 1800.0
    serving.joins(1, 2)
    (fault,) = serving.state.tick(1900.0)[1]
    assert "has awaited rank(s) 1 for 1000 s, more than the limit of 1000 s (PSGC_STEP_TIMEOUT_S)" in fault.text, (
        "a new connection is no new process"
    )


def test_a_connection_takes_the_place_of_another_once_it_has_said_hello_and_the_other_is_closed() -> None:
    serving = Serving()
    assert serving.state.proved("second", 1) == [] and serving.state.peers[1] == "peer 1 0"
    (close,) = serving.state.proved("third", 1)
    assert isinstance(close, Close) and close.peer == "second", "of those that have said nothing, one of each rank"
    close, *windows = serving.hears("third", 1, Kind.HELLO)
    assert isinstance(close, Close) and close.peer == "peer 1 0"
    assert [send.header.kind for send in windows] == [Kind.WINDOW] and serving.state.peers[1] == "third"
    for peer in ("peer 1 0", "second"):
        assert refused(serving.hears(peer, 1, Kind.HELLO)), "it is nobody's"


def test_word_of_a_death_that_comes_late_is_not_heeded() -> None:
    serving = Serving()
    serving.joins(1, 3)
    assert serving.state.leave_out(1, 2, 0.0) == [] and not serving.state.absent
    serving.state.leave_out(1, 3, 0.0)
    assert serving.state.absent == {1: 3} and serving.state.leave_out(7, 1, 0.0) == []
    assert serving.state.leave_out(1, 3, 0.0) == [], "it is said again and again"


def test_layouts_that_come_later_are_without_the_rank_too() -> None:
    serving = Serving()
    serving.state.leave_out(1, 1, 0.0)
    layout = build_layout(Declaration("y", "adhoc", SPEC, "none", True), layout_id=2, servers=1, workers=3)
    specs, costs = specs_of(layout, 0, 3)
    serving.state.register(layout, specs, costs)
    state = serving.state.keys[specs[0].key].state
    assert isinstance(state, KeyState) and state.absent == {1}


def test_a_broadcast_whose_root_has_died_ends_the_job_with_a_line() -> None:
    serving = Serving("broadcast", root=1)
    serving.skips(0)
    serving.state.leave_out(1, 1, 0.0)
    assert not [send for send in serving.skips(2) if send.header.kind == Kind.RESULT], "nobody else has its values"
    (fault,) = serving.state.tick(0.0)[1]
    assert fault.text.startswith("rank 1 died, and step 1 of key 1.0.0 (x) awaits its values")


def test_everyone_has_left_once_those_have_who_live() -> None:
    serving = Serving()
    serving.state.leave_out(1, 1, 0.0)
    assert not serving.state.deserted
    for rank in (0, 2):
        serving.says(rank, Kind.BYE)
    assert serving.state.deserted


def test_a_server_is_idle_while_everyone_is_connected_and_awaits_nothing() -> None:
    serving = Serving()
    assert serving.state.idle
    serving.skips(0)
    assert not serving.state.idle, "rank 0 awaits a result"
    serving.skips(2)
    serving.state.leave_out(1, 1, 0.0)
    assert serving.state.idle
    serving.state.lost(serving.state.peers[2])
    assert not serving.state.idle, "rank 2 may have something to send again"
