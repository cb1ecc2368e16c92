"""The files of a syncer: tokens, which are read again, and outer parameters, from which another syncer goes on; and numbers that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psgc.codecs import Stream
from psgc.errors import CodecError, PsgcError, RemoteProtocolError
from psgc.layout.update_rule import UpdateRule
from psgc.server.syncer import tokens as tokens_module
from psgc.server.syncer.picture import check_place, write
from psgc.server.syncer.state import INITIAL_VALUES, Learner, SyncerState
from psgc.server.syncer.tokens import Tokens, parsed
from psgc.server.syncer.values import Values, pair_of
from psgc.wire.learners import is_name, learner_key, learner_number


def test_learners_are_added_and_revoked_while_the_syncer_runs(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# sites\nlyon 0123456789   # the old one\n\noslo abcdefghij\n")
    tokens = Tokens(file)
    lyon, oslo, rome = (learner_number(name) for name in ("lyon", "oslo", "rome"))
    key = tokens.key(lyon)
    assert key == learner_key("0123456789", lyon) and tokens.admits(lyon, key)
    assert tokens.key(rome) != learner_key("", rome), "a name that is not in the list has no key that anybody could know"
    assert not tokens.read_again()
    file.write_text("oslo abcdefghij\nrome 0000000000\n")
    assert tokens.read_again()
    assert not tokens.admits(lyon, key) and tokens.admits(oslo, learner_key("abcdefghij", oslo))
    file.write_text("oslo\n")
    with pytest.raises(PsgcError, match="line 1: expected a name"):
        tokens.read_again()
    assert tokens.names.keys() == {"oslo", "rome"}, "the former list stays"


def test_a_list_that_is_wrong_is_told_once_for_each_change_of_it(tmp_path: Path) -> None:
    file, away = tmp_path / "tokens", tmp_path / "away"
    file.write_text("oslo abcdefghij\n")
    tokens = Tokens(file)

    def told() -> list[str]:
        found = []
        for _ in range(3):
            try:
                tokens.read_again()
            except PsgcError as error:
                found.append(str(error).partition(": --learners ")[2].removeprefix(str(file)))
        return found

    file.write_text("oslo\n")
    assert told() == [", line 1: expected a name (letters, digits, . _ -) and a token"]
    file.write_text("oslo  \n")
    assert told() == [", line 1: expected a name (letters, digits, . _ -) and a token"], "it was written again, and is still wrong"
    file.rename(away)
    assert told() == [": it cannot be read (No such file or directory)"]
    away.write_text("rome 0000000000\n")
    away.rename(file)
    assert told() == [] and tokens.names.keys() == {"rome"}
    file.rename(away)
    assert len(told()) == 1
    away.rename(file)
    assert told() == []
    file.rename(away)
    assert len(told()) == 1, "gone once more"


def test_without_a_file_the_token_is_everyones() -> None:
    tokens = Tokens(None, "secret")
    assert tokens.key(7) == learner_key("secret", 7) != tokens.key(8) and not tokens.read_again()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a 12345678\na 12345678", "line 2: a has a token already"),
        ("a short", "line 1: the token of a has 5 letters, and at least 8"),
        ("a b c", "line 1: expected a name"),
        ("-a 12345678", "line 1: expected a name"),
    ],
)
def test_a_wrong_line_is_told(text: str, said: str) -> None:
    with pytest.raises(PsgcError) as raised:
        parsed(text, "f")
    assert said in str(raised.value)


def test_names_whose_numbers_collide_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "learner_number", len)
    with pytest.raises(PsgcError, match="bb cannot stand beside aa"):
        parsed("aa 12345678\nbb 12345678", "f")


def test_names() -> None:
    assert is_name("site-1.gpu_0") and is_name("x" * 64)
    assert not any(map(is_name, ("", "a b", "-x", "x" * 65, "é", "a\n")))


def test_a_list_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PsgcError, match="cannot be read"):
        Tokens(tmp_path / "none")


def push(values: Values, delta: Any, codec: str = "none", staleness: int = 0, fragment: int = 0) -> None:
    codecs = pair_of(codec, "none")
    out = np.empty(codecs.push.payload_bound(delta.size), np.uint8)
    size = codecs.push.encode(delta, None, 1.0, Stream(0, 1, 0, 0), out).payload_bytes
    values.decode(codecs, fragment, out[:size], False)
    values.apply(fragment, staleness)


def begun(rule: str, sizes: tuple[int, ...]) -> Values:
    values = Values(UpdateRule.parse(rule))
    values.begin(sizes)
    for fragment, size in enumerate(sizes):
        values.decode(pair_of("none", "none"), fragment, np.arange(size, dtype=np.float32).view(np.uint8), True)
        values.apply(fragment, INITIAL_VALUES)
    return values


@pytest.mark.parametrize("rule", ["delayed:learners=2", "nesterov:round=0", "add"])
def test_another_syncer_goes_on_from_the_file_bit_for_bit(rule: str, tmp_path: Path) -> None:
    file, rng = tmp_path / "outer.npz", np.random.default_rng(0)
    deltas = [rng.normal(size=63).astype(np.float32) for _ in range(7)]
    whole, first = begun(rule, (63, 7)), begun(rule, (63, 7))
    for delta in deltas:
        push(whole, delta, staleness=3)
    for delta in deltas[:3]:
        push(first, delta, staleness=3)
    state = SyncerState(first.rule.canonical, ("w [63]", "b [7]"), (63, 7), [4, 1], {"lyon": Learner(9, [3, 0], 3, 3)})
    write(file, first.picture(state))
    second = Values(UpdateRule.parse(rule))
    again = second.load(file)
    assert (again.model, again.sizes, again.versions, again.learners) == (state.model, state.sizes, state.versions, state.learners)
    for delta in deltas[3:]:
        push(second, delta, staleness=3)
    for ours, theirs in zip(second.fragments, whole.fragments, strict=True):
        assert np.array_equal(ours, theirs)
    with pytest.raises(PsgcError, match="of the rule"):
        Values(UpdateRule.parse("delayed:learners=9")).load(file)


@pytest.mark.parametrize("rule", ["delayed:learners=2", "nesterov:round=0", "add"])
def test_a_picture_stays_as_it_was_whatever_is_applied_while_it_is_written(rule: str, tmp_path: Path) -> None:
    file, rng = tmp_path / "outer.npz", np.random.default_rng(0)
    values = begun(rule, (63, 7))
    state = SyncerState(values.rule.canonical, ("w [63]", "b [7]"), (63, 7), [4, 1])
    for count in range(4):
        push(values, rng.normal(size=63).astype(np.float32))
        picture = values.picture(state)
        wanted = {name: array.copy() for name, array in picture.items()}
        for _ in range(1 + count % 2):
            push(values, rng.normal(size=63).astype(np.float32))
            push(values, rng.normal(size=7).astype(np.float32), fragment=1)
        assert all(np.array_equal(picture[name], array) for name, array in wanted.items())
        assert not np.array_equal(values.fragments[0], wanted["values.0"])
        write(file, picture)


def test_a_file_that_is_torn_or_none_is_told(tmp_path: Path) -> None:
    file = tmp_path / "outer.npz"
    values = begun("add", (5,))
    write(file, values.picture(SyncerState("add", ("w [5]",), (5,), [1])))
    whole = file.read_bytes()
    for torn in (whole[:-30], b"PK", b"", b"hello"):
        file.write_bytes(torn)
        with pytest.raises(PsgcError, match="no file of a syncer's, or not whole"):
            Values(UpdateRule.parse("add")).load(file)
    with pytest.raises(PsgcError, match="--save"):
        write(tmp_path / "there" / "is" / "no", values.picture(SyncerState("add", ("w [5]",), (5,), [1])))


def test_a_disk_that_is_full_leaves_the_former_file_and_takes_no_room(tmp_path: Path) -> None:
    file, half = tmp_path / "outer.npz", tmp_path / "outer.npz.half"
    values, state = begun("add", (5,)), SyncerState("add", ("w [5]",), (5,), [1])
    write(file, values.picture(state))
    whole = file.read_bytes()
    half.symlink_to("/dev/full")
    with pytest.raises(PsgcError, match=r"--save .*outer.npz: No space left on device"):
        write(file, values.picture(state))
    assert file.read_bytes() == whole and not half.is_symlink()
    write(file, values.picture(state))


def test_a_place_that_cannot_be_written_is_told_before_anything_is_lost(tmp_path: Path) -> None:
    check_place(tmp_path / "outer.npz")
    assert not list(tmp_path.iterdir())
    for place in (tmp_path, tmp_path / ("x" * 254), tmp_path / "none" / "b.npz"):
        with pytest.raises(PsgcError, match="syncer: --save "):
            check_place(place)


@pytest.mark.parametrize("codec", ["int4", "topk:k=0.1", "int8:ef=0", "onebit"])
def test_what_learners_push_is_decoded_by_their_own_codecs(codec: str) -> None:
    values, delta = begun("add", (4097,)), np.random.default_rng(1).normal(size=4097).astype(np.float32)
    push(values, delta, codec)
    codecs = pair_of(codec, "none")
    out = np.empty(codecs.push.payload_bound(4097), np.uint8)
    size = codecs.push.encode(delta, None, 1.0, Stream(0, 1, 0, 0), out).payload_bytes
    wanted = np.arange(4097, dtype=np.float32) + codecs.push.reference_elements(out[:size].tobytes(), 4097)
    assert np.array_equal(values.fragments[0], wanted)


def test_payloads_that_are_none_and_numbers_that_are_not_finite_change_nothing() -> None:
    values = begun("add", (7,))
    before = values.fragments[0].copy()
    for payload in (
        None,
        np.zeros(5, np.uint8),
        np.full(7, np.nan, np.float32).view(np.uint8),
        np.full(7, np.inf, np.float32).view(np.uint8),
    ):
        with pytest.raises(RemoteProtocolError):
            values.decode(pair_of("none", "none"), 0, payload, False)
    assert np.array_equal(values.fragments[0], before)
    with pytest.raises(RemoteProtocolError, match="make more of them"):
        Values(UpdateRule.parse("add")).begin((1 << 28,))


def test_values_come_back_as_asked() -> None:
    values = begun("add", (9,))
    assert values.encoded(pair_of("int4", "none"), 0).view(np.float32).tolist() == list(range(9))
    assert values.encoded(pair_of("int4", "bf16"), 0).size == 18
    with pytest.raises(CodecError, match="values come back by none, bf16, fp16"):
        pair_of("int4", "int8")
