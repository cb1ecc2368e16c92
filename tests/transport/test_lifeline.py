"""When a member gives its scheduler up, and that it never does so too early."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from psgc.transport.control.lifeline import Lifeline, Sign

SILENCE_S, DEAD_S, TICK_S = 5.0, 60.0, 0.25


@dataclass
class Watched:
    """A lifeline and its clock. alive, refused, refusal: what it finds when it looks."""

    alive: bool | None = None
    refused: bool = False
    refusal: str = ""
    now: float = 100.0
    life: Lifeline = field(init=False)

    def __post_init__(self) -> None:
        self.life = Lifeline(
            "tcp://s:9", SILENCE_S, DEAD_S, TICK_S, self.now, lambda _: self.refused, lambda: self.alive, lambda: self.refusal
        )  # fmt: skip
        self.life.connection(True, self.now)

    def wait(self, seconds: float) -> list[Sign]:
        """What is said meanwhile; it stops at the end."""
        said: list[Sign] = []
        end = self.now + seconds
        while self.now < end and not (said and said[-1].gone):
            self.now += TICK_S
            if (sign := self.life.tick(self.now)) is not None:
                said.append(sign)
        return said


def test_a_scheduler_that_speaks_is_never_mentioned() -> None:
    watched = Watched()
    for _ in range(200):
        watched.life.hear(watched.now)
        assert watched.wait(1) == []


def test_on_its_own_host_a_silent_one_that_lives_is_named_ever_more_rarely_and_never_given_up() -> None:
    watched = Watched(alive=True)
    watched.life.connection(False, watched.now)
    watched.refused = True
    said = watched.wait(20 * DEAD_S)
    assert not any(sign.gone for sign in said)
    assert "tcp://s:9 has said nothing for 5 s; its process is stopped or busy, and is waited for" in said[0].text
    assert 20 <= len(said) <= 24


def test_a_process_that_is_gone_is_known_at_once_but_its_last_words_are_heard_first() -> None:
    watched = Watched(alive=False, refused=True)
    watched.life.hear(watched.now)
    assert watched.wait(1.25) == []
    (sign,) = watched.wait(1)
    assert sign.gone
    assert "its process has ended" in sign.text


@pytest.mark.parametrize("returns", [True, False])
def test_another_process_is_waited_for_while_somebody_listens_for_it_or_it_was_announced(returns: bool) -> None:
    watched = Watched(alive=False, refused=returns)
    watched.life.returns = returns
    watched.life.hear(watched.now)
    said = watched.wait(DEAD_S - 1)
    assert "its process has ended, and another is waited for, 60 s at most (PSGC_DEAD_S)" in said[0].text
    assert not any(sign.gone for sign in said)
    assert "no other has followed within 60 s (PSGC_DEAD_S)" in watched.wait(2)[-1].text


def test_the_process_that_follows_is_the_one_that_counts() -> None:
    watched = Watched(alive=False)
    watched.wait(DEAD_S - 1)
    watched.alive = True
    watched.life.hear(watched.now)
    assert watched.wait(SILENCE_S - 1) == []


def test_elsewhere_one_that_was_announced_is_waited_for_though_nobody_listens() -> None:
    watched = Watched(refused=True)
    watched.life.returns = True
    watched.life.connection(False, watched.now)
    assert not any(sign.gone for sign in watched.wait(DEAD_S - 1))
    assert watched.wait(2)[-1].gone


def test_elsewhere_a_machine_that_says_that_nobody_listens_ends_it() -> None:
    watched = Watched()
    watched.life.connection(False, watched.now)
    watched.refused = True
    said = watched.wait(SILENCE_S + 1)
    assert said[-1].gone
    assert "is gone: its connection broke 5 s ago and nobody listens there" in said[-1].text


def test_elsewhere_a_link_that_is_cut_for_20_s_costs_nothing() -> None:
    watched = Watched()
    watched.life.connection(False, watched.now)
    said = watched.wait(20)
    assert [sign.gone for sign in said] == [False, False]
    assert "after 60 s it counts as dead (PSGC_DEAD_S)" in said[0].text
    watched.life.connection(True, watched.now)
    watched.life.hear(watched.now)
    assert watched.wait(SILENCE_S - 1) == []


def test_elsewhere_silence_ends_it_in_the_end() -> None:
    said = Watched().wait(DEAD_S + 1)
    assert said[-1].gone
    assert "has said nothing for 60 s and counts as dead (PSGC_DEAD_S)" in said[-1].text


WHY = "the scheduler at tcp://s:9 does not take this member's token: set it"


@pytest.mark.parametrize("alive", [None, False])
def test_one_that_refuses_the_connection_is_not_called_silent_and_the_reason_is_said_as_soon_as_it_is_known(alive: bool | None) -> None:
    watched = Watched(alive=alive)
    watched.life.hear(watched.now)
    watched.life.connection(False, watched.now)
    assert "has said nothing for 5 s" in watched.wait(SILENCE_S)[0].text, "nothing else is known"
    watched.refusal = WHY
    watched.now += TICK_S
    assert watched.life.tick(watched.now) == Sign(f"{WHY}; it is asked again, for 60 s at most (PSGC_DEAD_S)")
    watched.refusal = ""  # it is only asked until it has said why
    said = watched.wait(DEAD_S)
    assert said[-1] == Sign(f"{WHY}; it was asked again for 60 s (PSGC_DEAD_S)", gone=True, cut_off=True)
    assert all(sign.text.startswith(WHY) for sign in said)


def test_on_its_own_host_one_that_refuses_the_connection_is_asked_again_without_end() -> None:
    watched = Watched(alive=True, refusal=WHY)
    watched.life.connection(False, watched.now)
    said = watched.wait(20 * DEAD_S)
    assert {(sign.text, sign.gone) for sign in said} == {(f"{WHY}; it is asked again", False)}
    assert 20 <= len(said) <= 24


def test_a_refusal_is_forgotten_once_the_connection_is_made() -> None:
    watched = Watched(refusal=WHY)
    watched.life.connection(False, watched.now)
    assert watched.wait(SILENCE_S)[-1].text.startswith(WHY)
    watched.refusal = ""
    watched.life.connection(True, watched.now)
    watched.life.hear(watched.now)
    watched.life.connection(False, watched.now)
    assert "has said nothing for 5 s" in watched.wait(SILENCE_S)[0].text


@pytest.mark.parametrize("up", [True, False])
def test_time_in_which_this_process_did_not_run_does_not_count(up: bool) -> None:
    watched = Watched(refused=True)
    watched.wait(1)
    watched.life.connection(up, watched.now)
    watched.now += 10 * DEAD_S
    assert watched.life.tick(watched.now) is None
    assert watched.wait(SILENCE_S - 2) == []
    said = watched.wait(DEAD_S)
    assert said[-1].gone, "what comes after that counts"
