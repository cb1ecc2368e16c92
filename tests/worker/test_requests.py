"""What a worker asks the scheduler for."""

from __future__ import annotations

from typing import Any

from psgc.layout import make_key
from psgc.program.agenda import Use
from psgc.wire.frames import Kind
from psgc.worker.requests import Requests


def test_turns_that_no_longer_fit_in_their_field_are_taken_in_order() -> None:
    """As after 50 days of a thousand turns a second."""
    said: list[tuple[Kind, dict[str, Any]]] = []
    requests, end, key = Requests(lambda kind, *_, **fields: said.append((kind, fields))), 1 << 32, make_key(1, 0, 0)
    requests._agenda.received = end - 1
    requests.ask_turn(key)
    assert said[-1] == (Kind.TURN, {"plan": end - 1, "key": key, "step": 1})
    assert requests.turns(0, Use(key + 1, 1)) == [], "the one after it came first"
    assert requests.turns(end - 1, Use(key, 1)) == [key, key + 1]
    assert requests.turns(end - 1, Use(key, 1)) == [], "told twice"
    requests.ask_turn(key)
    assert said[-1] == (Kind.TURN, {"plan": 1, "key": key, "step": 2})


def test_numbers_of_requests_begin_again_where_their_field_ends() -> None:
    said: list[int] = []
    requests = Requests(lambda *_, plan, **__: said.append(plan))
    requests._count = (1 << 32) - 2
    for name in ("a", "b", "c"):
        requests.publish(name, b"")
    assert said == [(1 << 32) - 1, 0, 1]


def test_what_nobody_looks_up_any_more_is_not_asked_for_again() -> None:
    said: list[tuple[Kind, int]] = []
    requests, found = Requests(lambda kind, *_, plan, **__: said.append((kind, plan))), list[bytes]()
    first, second = found.append, found.clear
    requests.look_up("there", first)
    requests.look_up("there", lambda _: second())
    requests.look_up("nowhere", first)
    requests.give_up_look_up("nowhere", first)
    requests.give_up_look_up("nowhere", first)
    requests.give_up_look_up("there", first)
    said.clear()
    requests.say_again()
    assert said == [(Kind.LOOKUP, 1)], "somebody still waits for it"
