"""A syncer's and several learners' conversations over connections that are cut: every push counts once, and its answer has it in."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from psgc import __version__
from psgc.layout.update_rule import UpdateRule
from psgc.server.syncer.picture import write
from psgc.server.syncer.state import INITIAL_VALUES, Answer, Apply, Begin, Drop, Send, SyncerState, unlike
from psgc.server.syncer.values import Values
from psgc.wire.frames import Header, Kind
from psgc.wire.learners import Enrol, Enrolled, learner_number
from psgc.wire.messages import ErrorCode, Notice, decode_body, encode_body
from psgc.worker.learner.conversation import Conversation

MODEL = ("a [2]\nb [3]", "c [4]")


def enrol(name: str, session: int = 1, fragments: tuple[str, ...] = MODEL) -> Enrol:
    return Enrol(name, __version__, session, "none", "none", fragments, (5, 4)[: len(fragments)] + (1,) * max(0, len(fragments) - 2))


@dataclass(eq=False)
class Wire:
    """One connection: two queues, which are lost when it is cut."""

    learner: str
    up: bool = True
    there: deque[Any] = field(default_factory=deque)
    back: deque[Any] = field(default_factory=deque)


def talking(name: str) -> Conversation:
    """Values are tuples of the pushes in them, and so is what is held; whoever brings some says so."""

    def bring(_: int, held: Any, pushed: Any, answered: Any) -> Any:
        if answered is not None:
            return name, answered
        return name, tuple(push for push in held if push != pushed)

    return Conversation(enrol(name), [(), ()], bring)


class Job:
    """Values are lists of the pushes in them: (learner, session, fragment, number)."""

    def __init__(self, seed: int, learners: int, pushes: int, losses: float = 0.0) -> None:
        self.losses, self.lost = losses, 0
        self.rng, self.state = random.Random(seed), SyncerState("delayed")
        self.values: list[list[Any]] = []
        self.brought: list[Any] = []
        self.given = None
        self.talks = {f"l{n}": talking(f"l{n}") for n in range(learners)}
        self.left = {(name, fragment): pushes for name in self.talks for fragment in range(2)}
        self.numbers = dict.fromkeys(self.left, 0)
        self.wires: dict[str, Wire] = {}
        self.staleness: list[int] = []
        for name in self.talks:
            self.connect(name)

    def connect(self, name: str) -> None:
        old = self.wires.get(name)
        if old is not None:
            old.up = False
            self.talks[name].disconnected()
            if self.rng.random() < 0.5:  # else the syncer hears of it when the learner enrols again
                self.effects(self.state.lost(old))
        self.wires[name] = Wire(name)
        self.wires[name].there.extend(self.talks[name].connected())

    def lose(self) -> None:
        """Another syncer, which knows nothing, takes the syncer's place."""
        self.lost += 1
        self.state, self.values, self.brought = SyncerState("delayed"), [], []
        for name, talk in self.talks.items():
            talk.disconnected()
            self.wires[name] = Wire(name)
            self.wires[name].there.extend(talk.connected())

    def effects(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Begin):
                self.values = [[] for _ in effect.sizes]
                self.brought = [""] * len(effect.sizes)
            elif isinstance(effect, Apply):
                if effect.staleness == INITIAL_VALUES:
                    self.brought[effect.fragment], values = self.given
                    self.values[effect.fragment] = list(values)
                else:
                    self.values[effect.fragment].append(self.given)
                    self.staleness.append(effect.staleness)
            elif isinstance(effect, Answer):
                assert all(self.brought), "nobody is given values before all initial ones are there"
                effect.peer.back.append((effect.header, tuple(self.values[effect.header.key])))
            elif isinstance(effect, Send):
                effect.peer.back.append((effect.header, effect.body))
            else:
                assert isinstance(effect, Drop)

    def turn(self) -> None:
        name = self.rng.choice(list(self.talks))
        wire, talk = self.wires[name], self.talks[name]
        act = self.rng.random()
        if self.rng.random() < self.losses:
            self.lose()
        elif act < 0.03:
            self.connect(name)
        elif act < 0.4 and wire.there:
            header, payload = wire.there.popleft()
            body = decode_body(Enrol, payload) if header.kind == Kind.REGISTER else None
            self.given = payload
            self.effects(self.state.receive(wire, learner_number(name), header, body))
        elif act < 0.8 and wire.back:
            header, payload = wire.back.popleft()
            assert header.kind != Kind.ERROR, payload
            wire.there.extend(talk.receive(header, payload))
        else:
            self.train(name)

    def train(self, name: str) -> None:
        talk = self.talks[name]
        for fragment, values in list(talk.answers.items()):
            number = self.numbers[name, fragment]
            own = [push[3] for push in values.payload if push[0] == name and push[2] == fragment]
            if self.lost and len(self.talks) > 1:
                assert not number or number in own, "another learner's values may lack what the syncer lost, but not what is answered"
            else:
                assert own == list(range(1, number + 1)), "an answer has all of the learner's own pushes in it, once each"
            if self.rng.random() < 0.3:
                continue  # it takes what has come later
            del talk.answers[fragment]
            talk.took(fragment, values.payload)
            if self.left[name, fragment]:
                self.left[name, fragment] -= 1
                self.numbers[name, fragment] += 1
                push = (name, 1, fragment, number + 1)
                self.wires[name].there.extend(talk.push(fragment, values.version, push, (*values.payload, push)))

    def run(self) -> Job:
        for _ in range(20_000):
            if not any(self.left.values()) and not any(talk.waits(f) for talk in self.talks.values() for f in range(2)):
                break
            self.turn()
        else:
            raise AssertionError("no progress")
        return self


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_every_push_counts_once_and_is_in_its_answer_whatever_is_cut(first: int) -> None:
    for seed in range(first, first + 50):
        learners = 1 + seed % 4
        job = Job(seed, learners, 6).run()
        assert len(set(job.brought)) == 1, f"seed {seed}: the initial values are one learner's"
        for fragment, values in enumerate(job.values):
            wanted = sorted((name, 1, fragment, n) for name in job.talks for n in range(1, 7))
            assert sorted(values) == wanted, f"seed {seed}"
        assert job.state.versions == [1 + 6 * learners] * 2


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_learners_go_on_with_a_syncer_that_has_lost_everything_from_what_one_of_them_has(first: int) -> None:
    lost = 0
    for seed in range(first, first + 50):
        learners = 1 + seed % 4
        job = Job(seed, learners, 6, losses=0.01).run()
        lost += job.lost
        assert len(set(job.brought)) == 1, f"seed {seed}: the values are one learner's"
        if learners == 1:
            assert job.values == [[("l0", 1, fragment, n) for n in range(1, 7)] for fragment in range(2)], "it knows all that there was"
    assert lost > 50


def test_the_simulation_sees_a_push_that_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SyncerState._push

    def push(self: SyncerState, peer: Any, learner: Any, header: Header) -> Any:
        learner.applied[header.key] = min(learner.applied[header.key], header.step - 1)
        return original(self, peer, learner, header)

    monkeypatch.setattr(SyncerState, "_push", push)
    with pytest.raises(AssertionError):
        [Job(seed, 2, 6).run() for seed in range(50)]


def admitted(state: SyncerState, peer: Any, name: str, **more: Any) -> list[Any]:
    return state.receive(peer, learner_number(name), Header(Kind.REGISTER), enrol(name, **more))


def said(effects: list[Any]) -> str:
    return next(decode_body(Notice, each.body).text for each in effects if isinstance(each, Send) and each.header.kind == Kind.ERROR)


def test_staleness_is_what_the_base_lacks() -> None:
    state = SyncerState("delayed")
    for peer, name in ((1, "a"), (2, "b")):
        admitted(state, peer, name)
    for fragment in range(2):
        state.receive(1, learner_number("a"), Header(Kind.PUSH, key=fragment))
    found = []
    for peer, name, step, base in ((1, "a", 1, 1), (1, "a", 2, 2), (2, "b", 1, 1), (1, "a", 3, 3)):
        effects = state.receive(peer, learner_number(name), Header(Kind.PUSH, key=0, step=step, plan=base))
        found += [each.staleness for each in effects if isinstance(each, Apply)]
    assert found == [0, 0, 2, 1]


def test_staleness_is_told_where_versions_no_longer_fit_in_their_field() -> None:
    state, end = SyncerState("delayed"), 1 << 32
    admitted(state, 1, "a")
    for fragment in range(2):
        state.receive(1, learner_number("a"), Header(Kind.PUSH, key=fragment))
    state.versions[0] = end - 1
    found, told = [], []
    for step, base in ((1, end - 2), (2, end - 1), (3, end - 1)):
        for effect in state.receive(1, learner_number("a"), Header(Kind.PUSH, key=0, step=step, plan=base)):
            found += [effect.staleness] if isinstance(effect, Apply) else []
            told += [effect.header.plan] if isinstance(effect, Answer) else []
    assert found == [1, 1, 2] and told == [0, 1, 2]


def test_another_learner_brings_the_values_if_the_first_is_lost() -> None:
    state = SyncerState("delayed")
    assert b'"bring":true' in admitted(state, 1, "a")[-1].body
    assert b'"bring":false' in admitted(state, 2, "b")[-1].body
    assert state.receive(2, learner_number("b"), Header(Kind.PULL, key=0)) == []
    (asked,) = state.lost(1)
    assert asked.peer == 2 and b'"bring":true' in asked.body


def test_a_learner_that_leaves_before_it_brings_anything_does_not_fix_the_model() -> None:
    other = ("a [2]",)
    state = SyncerState("delayed")
    admitted(state, 1, "a")
    state.receive(1, learner_number("a"), Header(Kind.PUSH, key=0))
    assert state.lost(1) == [] and state.awaited == ""
    assert Begin((5,)) in admitted(state, 2, "b", fragments=other)
    assert "another model" in said(admitted(state, 3, "a", session=2)), "while its learner is there"
    effects = admitted(state, 4, "b", session=2)  # beside its former connection, which is half-open
    assert Begin((5, 4)) in effects and effects.index(Drop(2, told=True)) < effects.index(Begin((5, 4)))
    for fragment in range(2):
        state.receive(4, learner_number("b"), Header(Kind.PUSH, key=fragment))
    assert state.begun
    state.lost(4)
    assert "another model" in said(admitted(state, 5, "a", session=3, fragments=other)), "values that are there stay"


def test_a_push_leaves_once_the_values_of_another_learner_are_there() -> None:
    """The syncer's values were lost, and a's are awaited."""
    talk = talking("b")

    def told(bring: bool, awaits: str) -> list[tuple[Kind, int, int]]:
        messages = talk.receive(Header(Kind.LAYOUT), encode_body(Enrolled(bring, "delayed", awaits)))
        return [(Kind(message.header.kind), message.header.key, message.header.step) for message in messages]

    talk.connected()
    assert told(False, "") == [(Kind.PULL, 0, 0), (Kind.PULL, 1, 0)]
    for fragment in range(2):
        talk.receive(Header(Kind.RESULT, key=fragment, plan=1), ())
        talk.answers.pop(fragment)
    assert len(talk.push(0, 1, ("first",), (("first",),))) == 1
    talk.disconnected()
    talk.connected()
    assert told(False, "a") == []
    assert talk.push(1, 1, ("second",), (("second",),)) == []
    assert told(False, "") == [(Kind.PUSH, 0, 1), (Kind.PUSH, 1, 1)]
    assert told(False, "") == [], "once on each connection"
    talk.disconnected()
    talk.connected()
    assert told(False, "a") == []
    assert told(True, "b") == [(Kind.PUSH, 0, 0), (Kind.PUSH, 1, 0), (Kind.PUSH, 0, 1), (Kind.PUSH, 1, 1)], "or its own, if a is lost"
    assert told(False, "") == []


def test_learners_are_told_whose_initial_values_are_awaited_and_told_again_when_it_is_anothers() -> None:
    def said_to(effects: list[Any]) -> dict[int, Enrolled]:
        return {each.peer: decode_body(Enrolled, each.body) for each in effects if isinstance(each, Send)}

    state = SyncerState("delayed")
    assert state.awaited == ""
    assert said_to(admitted(state, 1, "a")) == {1: Enrolled(True, "delayed", "a")}
    talks = {peer: talking(name) for peer, name in ((2, "b"), (3, "c"))}
    for peer, name in ((2, "b"), (3, "c")):
        (told,) = admitted(state, peer, name)
        pulls = talks[peer].receive(told.header, told.body)
        assert talks[peer].awaits == "a" and [message.header.kind for message in pulls] == [Kind.PULL] * 2
        for message in pulls:
            state.receive(peer, learner_number(name), message.header)
    assert state.awaited == "a" and state.waiting == 2
    told = state.lost(1)
    assert said_to(told) == {2: Enrolled(True, "delayed", "b"), 3: Enrolled(False, "delayed", "b")}
    said = {each.peer: talks[each.peer].receive(each.header, each.body) for each in told}
    assert [(message.header.kind, message.header.step) for message in said[2]] == [(Kind.PUSH, 0)] * 2
    assert said[3] == [] and talks[3].awaits == "b", "it does not ask twice"
    effects = [effect for message in said[2] for effect in state.receive(2, learner_number("b"), message.header)]
    assert state.awaited == "" and state.waiting == 0
    for each in effects:
        if isinstance(each, Answer) and each.peer == 3:
            talks[3].receive(each.header, b"values")
    assert talks[3].awaits == "" and not talks[3].unanswered
    assert said_to(admitted(state, 4, "d")) == {4: Enrolled(False, "delayed", "")}


@pytest.mark.parametrize(
    ("fragments", "text"),
    [
        (("a [2]\nb [3]", "c [5]"), "in fragment 1 parameter c [5], where c [4] is expected"),
        (("a [2]", "c [4]"), "fragment 0 has 1 parameters, and 2 expected"),
        (("a [2]\nb [3]",), "1 fragments, and 2 expected; give every learner the same number"),
    ],
)
def test_a_learner_with_another_model_is_told_where_it_differs(fragments: tuple[str, ...], text: str) -> None:
    state = SyncerState("delayed")
    admitted(state, 1, "a")
    assert said(admitted(state, 2, "b", fragments=fragments)) == f"syncer: learner b has another model than this syncer: {text}"
    assert 2 not in state.peers and unlike(MODEL, MODEL) is None


def test_a_name_has_one_process_the_newest() -> None:
    state = SyncerState("delayed")
    admitted(state, 1, "a", session=1)
    effects = admitted(state, 2, "a", session=2)
    assert "another process has enrolled as learner a" in said(effects) and Drop(1, told=True) in effects
    assert state.peers.keys() == {2}
    effects = admitted(state, 3, "a", session=2)  # its own new connection
    assert not [each for each in effects if isinstance(each, Send) and each.header.kind == Kind.ERROR] and Drop(2, told=False) in effects


def test_a_process_whose_place_was_taken_while_it_was_out_of_reach_does_not_come_back_and_its_push_counts_once(tmp_path: Path) -> None:
    state, number = SyncerState("delayed"), learner_number("a")
    admitted(state, 1, "a", session=1)
    for fragment in range(2):
        state.receive(1, number, Header(Kind.PUSH, key=fragment))
    pushed = Header(Kind.PUSH, key=0, step=1, plan=1)
    assert any(isinstance(each, Apply) for each in state.receive(1, number, pushed))
    state.lost(1)
    admitted(state, 2, "a", session=2)
    again = admitted(state, 3, "a", session=1)
    assert "another process has enrolled as learner a" in said(again) and state.peers.keys() == {2}
    assert not any(isinstance(each, Apply) for each in state.receive(3, number, pushed))
    values = Values(UpdateRule.parse("delayed"))
    values.begin((5, 4))
    write(tmp_path / "outer.npz", values.picture(state))
    other = Values(values.rule).load(tmp_path / "outer.npz")
    assert "another process has enrolled as learner a" in said(admitted(other, 1, "a", session=1)), "a syncer that follows knows it, too"
    assert [each.header.kind for each in admitted(other, 2, "a", session=2)] == [Kind.LAYOUT]


def test_a_learner_that_was_refused_says_nothing_more() -> None:
    talk = talking("a")
    assert [message.header.kind for message in talk.connected()] == [Kind.REGISTER]
    talk.receive(Header(Kind.LAYOUT), encode_body(Enrolled(False, "delayed")))
    talk.receive(Header(Kind.ERROR), encode_body(Notice(ErrorCode.DISAGREE, "another process")))
    assert talk.failed == "another process"
    assert talk.receive(Header(Kind.LAYOUT), encode_body(Enrolled(False, "delayed"))) == []
    assert talk.leave() == []
    talk.disconnected()
    assert talk.connected() == []


def test_what_is_no_word_of_a_learners_is_refused_and_nothing_else_changes() -> None:
    state = SyncerState("delayed")
    assert "enrol first" in said(state.receive(1, 5, Header(Kind.PUSH)))
    assert "has proved another name's token" in said(state.receive(1, 5, Header(Kind.REGISTER), enrol("a")))
    admitted(state, 1, "a")
    number = learner_number("a")
    assert "does not send RESULT" in said(state.receive(1, number, Header(Kind.RESULT)))
    assert "fragment 7, but the model has 2" in said(state.receive(1, number, Header(Kind.PULL, key=7)))
    assert "initial values have not come" in said(state.receive(1, number, Header(Kind.PUSH, step=1)))
    old = Enrol("b", "0.0", 1, "none", "none", MODEL, (5, 4))
    assert "runs psgc 0.0" in said(state.receive(2, learner_number("b"), Header(Kind.REGISTER), old))
