"""A learner and its syncer, in one process: what outer steps make of it, what comes back late, and what does not fit."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc import __version__ as psgc_version
from psgc.config import Config
from psgc.errors import CodecError, JobFailed, NonFiniteError, PsgcError, UsageError
from psgc.layout.update_rule import UpdateRule
from psgc.server.syncer import loop as loop_module
from psgc.server.syncer import saver as saver_module
from psgc.server.syncer.loop import Settings, Syncer
from psgc.server.syncer.values import Values
from psgc.wire.frames import Kind
from psgc.wire.learners import Enrol
from psgc.worker.learner.client import LearnerClient

Start = Callable[..., tuple[Syncer, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Begins a syncer in a thread of its own; its object, and where it listens."""
    running: list[tuple[Syncer, threading.Thread]] = []

    def begin(rule: str = "delayed:learners=1,momentum=0.9", port: int = 0, **more: Any) -> tuple[Syncer, str]:
        syncer = Syncer(Config(role="server"), Settings("127.0.0.1", port, UpdateRule.parse(rule), **more))
        thread = threading.Thread(target=syncer.run, daemon=True)
        running.append((syncer, thread))
        thread.start()
        return syncer, f"127.0.0.1:{syncer.port}"

    yield begin
    for syncer, thread in running:
        stop(syncer)
        thread.join(100)


def stop(syncer: Syncer) -> None:
    syncer.mailbox.put(syncer.end, "the test")


def held(mailbox: Any, go_on: threading.Event) -> None:
    """Once the thread whose mailbox it is does nothing until ``go_on``."""
    there = threading.Event()

    def hold() -> None:
        there.set()
        go_on.wait()

    mailbox.put(hold)
    there.wait()


def model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def trained(own: nn.Module, outside: Any, steps: int) -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        outside.zero_grad()
        own(torch.randn(4, 3, generator=draw)).square().sum().backward()
        outside.step()


@pytest.mark.parametrize("steps", [15, 16])  # after the latter a fragment has just left
@pytest.mark.parametrize("fragments", [1, 3])
def test_one_learner_that_waits_does_what_diloco_does(alone: None, start: Start, fragments: int, steps: int) -> None:
    found = []
    for kind in ("decoupled", "diloco"):
        own = model()
        inner = torch.optim.SGD(own.parameters(), lr=0.01)
        settings: dict[str, Any] = {"every": 4, "fragments": fragments, "delay": 0}
        if kind == "decoupled":
            outside: Any = psgc.Decoupled(own, inner, at=start()[1], name="one", **settings)
        else:
            outside = psgc.DiLoCo(own, inner, **settings)
        with outside:
            trained(own, outside, steps)
            found.append([parameter.detach().clone() for parameter in own.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_one_exchange_at_a_time_counts_an_optimizers_steps(alone: None, start: Start) -> None:
    own, at = model(), start()[1]
    inner = torch.optim.SGD(own.parameters(), lr=0.01)
    first = psgc.Decoupled(own, inner, at=at, name="one", every=2)
    text = "the Decoupled of learner one counts this optimizer's steps, and has some to exchange; call its finish"
    with pytest.raises(UsageError, match=f"Decoupled: {text}"):
        psgc.Decoupled(own, inner, at=at, name="two", every=2)
    with pytest.raises(UsageError, match=f"DiLoCo: {text}"):
        psgc.DiLoCo(own, inner, every=2)
    first.finish()
    outside = psgc.DiLoCo(own, inner, every=2)
    trained(own, outside, 1)
    with pytest.raises(UsageError, match=r"Decoupled: another DiLoCo counts this optimizer's steps"):
        psgc.Decoupled(own, inner, at=at, name="two", every=2)
    outside.finish()
    second = psgc.Decoupled(own, inner, at=at, name="two", every=2)
    trained(own, second, 3)
    second.finish()
    trained(own, inner, 1)
    assert (first.steps, outside.steps, second.steps) == (0, 1, 3)


def test_what_was_frozen_and_is_trained_later_is_refused_before_the_next_push(alone: None, start: Start) -> None:
    own = model()
    frozen = own.get_parameter("2.weight").requires_grad_(False)
    outside = psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), at=start()[1], name="one", every=2)
    trained(own, outside, 3)
    frozen.requires_grad_(True)
    with pytest.raises(UsageError, match=r"parameter '2.weight' is trained now, and was frozen when Decoupled was made"):
        trained(own, outside, 1)
    frozen.requires_grad_(False)
    outside.finish()


def test_what_is_trained_and_not_the_models_is_refused_before_the_next_push(alone: None, start: Start) -> None:
    own, at = model(), start()[1]
    other = torch.optim.SGD([*own.parameters(), nn.Parameter(torch.ones(3))], lr=0.01)
    with pytest.raises(UsageError, match=r"Decoupled: parameter 4 of the inner optimizer's group 0, of shape \[3\], is not the model's"):
        psgc.Decoupled(own, other, at=at, name="one", every=2)
    inner = torch.optim.SGD(own.parameters(), lr=0.01)
    with psgc.Decoupled(own, inner, at=at, name="one", every=1) as outside:
        own.adapter = nn.Linear(2, 2, bias=False)
        inner.add_param_group({"params": own.adapter.parameters()})
        with pytest.raises(UsageError, match=r"Decoupled: parameter 'adapter.weight' was not the model's when Decoupled was made"):
            trained(own, outside, 1)
        own.adapter.requires_grad_(False)


def moved_by(own: nn.Module, change: float) -> None:
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(change)


def test_how_a_16_bit_learner_rounds_the_syncers_values_is_no_progress(alone: None, start: Start) -> None:
    syncer, at = start("add")
    narrow = nn.Linear(2, 2).bfloat16()
    nn.init.ones_(narrow.weight), nn.init.ones_(narrow.bias)
    wide = nn.Linear(2, 2)
    narrow_learner = psgc.Decoupled(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1), every=1, at=at, name="narrow", delay=None)
    wide_learner = psgc.Decoupled(wide, torch.optim.SGD(wide.parameters(), lr=0.1), every=1, at=at, name="wide", delay=None)
    part, grain = narrow_learner._parts[0], 2**-7  # of bfloat16, from 1 to 2
    moved_by(wide, 0.3 * grain)
    wide_learner._leave(wide_learner._parts[0])
    wide_learner._take(wide_learner._parts[0], wait=True)
    for _ in range(5):
        moved_by(narrow, grain)
        narrow_learner._leave(part)
        moved_by(narrow, grain)  # while the answer is on its way
        narrow_learner._take(part, wait=True)
    narrow_learner.finish()
    assert syncer._values.fragments[0] == pytest.approx(1 + 10.3 * grain, abs=1e-6)
    wide_learner.finish()


def test_what_has_not_moved_is_not_pushed_again(alone: None, start: Start) -> None:
    syncer, at = start("delayed:learners=1,momentum=0.9")
    own = model()
    with psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), every=4, delay=0, at=at, name="a") as outside:
        trained(own, outside, 8)
    assert syncer._state.learners["a"].pushes == 2, "else the momentum would go on alone"
    total = torch.cat([parameter.detach().reshape(-1) for parameter in own.parameters()])
    assert syncer._values.fragments[0] == pytest.approx(total.numpy(), abs=1e-7)


def test_a_learner_that_joins_late_goes_on_from_what_the_syncer_has(alone: None, start: Start) -> None:
    at = start("add")[1]
    first, second = model(1), model(2)
    with psgc.Decoupled(first, torch.optim.SGD(first.parameters(), lr=0.01), every=2, at=at, name="a") as outside:
        trained(first, outside, 5)
    late = psgc.Decoupled(second, torch.optim.SGD(second.parameters(), lr=0.01), every=2, at=at, name="b")
    for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    late.finish()


def test_what_was_done_while_the_answer_was_on_its_way_is_kept(alone: None, start: Start) -> None:
    syncer, at = start("add")
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    outside = psgc.Decoupled(own, inner, every=1, at=at, name="a", delay=None)
    part = outside._parts[0]
    before = part.base.copy()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(1)
    outside._leave(part)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(2)
    outside._take(part, wait=True)
    assert torch.allclose(torch.from_numpy(part.base), torch.from_numpy(before + 1)), "the syncer has the first change"
    assert torch.allclose(torch.from_numpy(part._flat.read()), torch.from_numpy(before + 3)), "and the learner both"
    outside.steps = 1
    outside.finish()
    assert torch.allclose(torch.from_numpy(part._flat.read()), torch.from_numpy(before + 3))
    assert syncer._values.fragments[0] == pytest.approx(before + 3, abs=1e-5), "nothing is lost or counts twice"


def test_no_step_waits_while_the_syncer_is_away_and_nothing_is_lost(alone: None, start: Start, tmp_path: Path) -> None:
    file = tmp_path / "outer.npz"
    syncer, at = start("add", save=file)
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.01)
    outside = psgc.Decoupled(own, inner, every=2, at=at, name="a")
    trained(own, outside, 2)
    while outside._client.waits(0):
        pass
    stop(syncer)
    while outside._client._link.up:
        time.sleep(0.01)
    port = syncer.port
    trained(own, outside, 20)
    assert outside.stayed > 0, "with its last push on its way a fragment stays, and training goes on"
    again, _ = _until_free(lambda: start("add", port=port, save=file))
    outside.finish()
    total = torch.cat([parameter.detach().reshape(-1) for parameter in own.parameters()])
    assert again._values.fragments[0] == pytest.approx(total.numpy(), abs=1e-5)
    assert again._state.learners["a"].pushes >= 2


@pytest.mark.parametrize("codec", ["none", "int4", "topk:k=0.3/bf16"])
def test_learners_bring_a_syncer_that_has_lost_its_values_those_that_they_have(alone: None, start: Start, codec: str) -> None:
    """With a push under way when the syncer dies, and without."""
    syncer, at = start("add")
    own, other = model(1), model(2)
    first, second = (
        psgc.Decoupled(each, torch.optim.SGD(each.parameters(), lr=0.01), every=1, at=at, name=name, codec=codec)
        for each, name in ((own, "a"), (other, "b"))
    )
    for each, outside in ((own, first), (other, second)):
        moved_by(each, 1.0)
        outside._leave(outside._parts[0])
        outside._take(outside._parts[0], wait=True)
    stop(syncer)
    while first._client._link.up or second._client._link.up:
        time.sleep(0.01)
    was = [outside._parts[0]._flat.read() for outside in (first, second)]
    moved_by(own, 0.5)
    first._leave(first._parts[0])
    again, _ = _until_free(lambda: start("add", port=syncer.port))
    first._take(first._parts[0], wait=True)
    second.finish()
    first.finish()
    assert again._state.learners.keys() == {"a", "b"}, "both go on"
    # Whichever was the first, the values are one of theirs, with what a has pushed since; what a codec holds back is small beside that.
    values = again._values.fragments[0]
    assert min(abs(values - each - 0.5).max() for each in was) < (1e-5 if codec == "none" else 1.3)


def test_what_a_learner_brings_is_without_its_push_under_way_and_what_has_come_is_in_it(alone: None, start: Start) -> None:
    own = model()
    outside = psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), every=1, at=start("add")[1], name="a", codec="int4")
    part = outside._parts[0]
    before = part.base
    kept = before.copy()
    assert part.brought(before, None, None).view("f4").tolist() == kept.tolist()
    moved_by(own, 1.0)
    payload = part.leave("a")
    brought = part.brought(part.base, payload, None).view("f4")
    assert brought == pytest.approx(kept + part.residual, abs=1e-6), "the codec has not sent that yet"
    part.take(np.full(part.numel, 7, np.float32).view(np.uint8), "a")
    assert part.brought(before, payload, np.full(part.numel, 7, np.float32).view(np.uint8)).view("f4").tolist() == [7.0] * part.numel
    assert before.tolist() == kept.tolist(), "what the connection's thread may read is not written to"
    outside._close()


def test_the_initial_values_are_saved_at_once(alone: None, start: Start, tmp_path: Path) -> None:
    file = tmp_path / "outer.npz"
    at = start("add", save=file, every_s=1e6)[1]
    own = model()
    outside = psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), every=1, at=at, name="a")
    while not file.exists():
        time.sleep(0.01)
    assert Values(UpdateRule.parse("add")).load(file).begun
    outside.finish()


def test_learners_are_answered_while_a_saving_takes_its_time_and_the_next_has_what_it_lacks(
    alone: None, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real = tmp_path / "outer.npz", saver_module.write
    began, go_on, saved = threading.Event(), threading.Event(), list[bytes]()

    def write(path: Path, picture: Any) -> None:
        began.set()
        go_on.wait()
        real(path, picture)
        saved.append(path.read_bytes())

    monkeypatch.setattr(saver_module, "write", write)
    syncer, at = start("delayed:learners=3", save=file, every_s=0.01)
    own = model()
    outside = psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), every=1, delay=0, at=at, name="a")
    began.wait()
    trained(own, outside, 4)
    assert not file.exists() and syncer._state.learners["a"].pushes == 4
    go_on.set()
    while not saved:
        time.sleep(0.01)
    first = tmp_path / "first.npz"
    first.write_bytes(saved[0])
    assert Values(UpdateRule.parse("delayed:learners=3")).load(first).learners["a"].pushes == 0, "as it was when the saving began"
    outside.finish()
    stop(syncer)
    again, _ = _until_free(lambda: start("delayed:learners=3", port=syncer.port, save=file))
    assert again._state.learners["a"].pushes == 4
    assert again._values.fragments[0].tolist() == syncer._values.fragments[0].tolist()


def test_the_time_to_the_next_saving_runs_from_the_end_of_the_last() -> None:
    saver = saver_module.Saver(Path("none"), 10.0, 1.0, 0.0, lambda: None)
    saver.changed = True
    assert not saver.due(9.0) and saver.due(10.0)
    saver._writing, saver.changed = Future(), False
    saver.changed = True
    assert not saver.due(50.0), "one at a time"
    saver._writing.set_result(None)
    saver.ended(60.0)
    assert not saver.due(69.0) and saver.due(70.0)
    saver._writing = Future()
    saver._writing.set_exception(MemoryError("no room"))
    saver.changed = False
    saver.ended(80.0)
    assert saver.changed and not saver.due(89.0) and saver.due(90.0), "tried again"
    saver.soon()
    assert saver.due(81.0)


def test_a_syncer_outlives_a_disk_that_is_full_for_a_while(
    alone: None, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, half = tmp_path / "outer.npz", tmp_path / "outer.npz.half"
    syncer, at = start("add", save=file, every_s=0.01)
    half.mkdir()
    own = model()
    outside = psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), every=1, delay=0, at=at, name="a")
    trained(own, outside, 2)
    while "and saving is tried again" not in caplog.text:
        pass
    trained(own, outside, 2)
    assert not file.exists()
    half.rmdir()
    while "saved to" not in caplog.text:
        pass
    outside.finish()
    assert f"syncer: --save {file}: Is a directory; what was pushed in the last" in caplog.text
    stop(syncer)
    again, _ = _until_free(lambda: start("add", port=syncer.port, save=file))
    assert again._state.learners["a"].pushes == 4


def test_what_cannot_be_saved_at_the_end_is_an_error(tmp_path: Path) -> None:
    syncer = Syncer(Config(role="server"), Settings("127.0.0.1", 0, UpdateRule.parse("add"), save=tmp_path / "outer.npz"))
    syncer._state.model, syncer._state.sizes, syncer._state.versions, syncer._saver.changed = ("w [1]",), (1,), [1], True
    syncer._values.begin((1,))
    (tmp_path / "outer.npz.half").mkdir()
    syncer.end("the test")
    with pytest.raises(PsgcError, match=r"syncer: --save .*outer.npz: Is a directory"):
        syncer.run()


def _until_free(call: Callable[[], tuple[Syncer, str]]) -> tuple[Syncer, str]:
    """The port is free once the former syncer has ended."""
    while True:
        with contextlib.suppress(PsgcError):
            return call()


def test_halves_and_codecs(alone: None, start: Start) -> None:
    own = model().bfloat16()
    with psgc.Decoupled(
        own, torch.optim.SGD(own.parameters(), lr=0.01), every=1, delay=0, at=start()[1], name="a", codec="int4/bf16"
    ) as outside:
        for _ in range(3):
            outside.zero_grad()
            own(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            outside.step()
    assert {parameter.dtype for parameter in own.parameters()} == {torch.bfloat16}


def test_what_the_codec_has_not_sent_is_part_of_the_state(alone: None, start: Start) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.01)
    outside = psgc.Decoupled(own, inner, every=1, delay=0, at=start()[1], name="a", codec="topk:k=0.1")
    trained(own, outside, 3)
    state = outside.state_dict()
    outside.finish()
    assert state["steps"] == 3 and state["residuals"][0].abs().sum() > 0
    other = psgc.Decoupled(own, inner, every=1, at=start()[1], name="a", codec="topk:k=0.1")
    other.load_state_dict(state)
    assert torch.equal(other.state_dict()["residuals"][0], state["residuals"][0])
    other.finish()
    plain = psgc.Decoupled(own, inner, every=1, at=start()[1], name="a")
    with pytest.raises(UsageError, match="of other fragments, or of another codec"):
        plain.load_state_dict(state)
    plain.finish()


def test_what_is_no_state_of_a_learner_is_told_and_changes_nothing(alone: None, start: Start) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.01)
    with psgc.DiLoCo(own, inner, every=1) as other:
        trained(own, other, 2)
        of_diloco = other.state_dict()
    with psgc.Decoupled(own, inner, every=1, delay=0, at=start()[1], name="a", codec="topk:k=0.1") as outside:
        trained(own, outside, 3)
        before = outside.state_dict()
        good = before["residuals"]
        for wrong in (
            {},
            None,
            of_diloco,
            inner.state_dict(),
            {"steps": 1},
            {"steps": None, "residuals": good},
            {"steps": 1, "residuals": [0.5]},
        ):
            with pytest.raises(UsageError, match=r"Decoupled: this is no state of a Decoupled's state_dict\(\)"):
                outside.load_state_dict(wrong)  # type: ignore[arg-type]
        after = outside.state_dict()
    assert after["steps"] == 3 and torch.equal(after["residuals"][0], before["residuals"][0])


def test_progress_that_is_not_finite_is_not_pushed(alone: None, start: Start) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.01)
    outside = psgc.Decoupled(own, inner, every=1, delay=0, at=start()[1], name="a")
    with torch.no_grad():
        next(own.parameters())[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="learner a: fragment 0 has NaN or infinity"):
        inner.step()
    outside._close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"every": 0}, "Decoupled: every=0"),
        ({"every": 4, "delay": 4}, "a delay of 4 steps"),
        ({"every": 9, "fragments": 5}, "Decoupled: 5 fragments of 4 parameters; choose at most as many"),
        ({"every": 2, "name": "a b"}, "name='a b' (or PSGC_LEARNER): expected this learner's name"),
        ({"every": 2, "name": ""}, "expected this learner's name"),
        ({"every": 2, "at": "somewhere"}, "at='somewhere' (or PSGC_SYNCER): expected host:port"),
    ],
)
def test_what_does_not_fit_is_told_in_a_line(alone: None, settings: dict[str, Any], text: str) -> None:
    own = model()
    with pytest.raises(UsageError, match=r".*") as raised:
        psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.1), **{"at": "127.0.0.1:1", "name": "a", **settings})
    assert text in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("codec", ["powersgd", "int4/int8", "onebit/relay", "int5"])
def test_a_codec_that_needs_rounds_or_answers_with_residuals_is_refused(alone: None, codec: str) -> None:
    own = model()
    with pytest.raises(CodecError, match=r".*") as raised:
        psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.1), every=2, at="127.0.0.1:1", name="a", codec=codec)
    assert "\n" not in str(raised.value)


def test_an_exchange_that_has_ended_is_not_gone_on_with_in_silence(alone: None, start: Start) -> None:
    at, own = start("add")[1], model()
    inner = torch.optim.SGD(own.parameters(), lr=0.01)
    over = "learner a's exchange has ended, with finish.. or its block; make another Decoupled to go on"
    with psgc.Decoupled(own, inner, every=2, at=at, name="a") as outside:
        trained(own, outside, 3)
    with pytest.raises(UsageError, match=over), outside:
        pass
    for call in (outside.step, outside.finish):
        with pytest.raises(UsageError, match=over):
            call()
    inner.step()  # by itself, it goes on as ever
    assert outside.steps == 3
    with psgc.Decoupled(own, inner, every=2, at=at, name="a") as outside:
        outside.finish()
        with pytest.raises(UsageError, match=over):
            inner.step()
        with pytest.raises(UsageError, match=over):
            outside.finish()
    inner.step()
    assert not inner._optimizer_step_post_hooks


@contextlib.contextmanager
def stuck(syncer: Syncer) -> Iterator[Callable[[], None]]:
    """The syncer does nothing, as one that is stopped, or whose disk is, until the yielded function is called; its connections stand."""
    go_on = threading.Event()
    held(syncer.mailbox, go_on)
    try:
        yield go_on.set
    finally:
        go_on.set()


def impatient(**more: float) -> None:
    session = psgc.current_session()
    session.config = psgc_config(session.config, silence_s=0.2, **more)


@contextlib.contextmanager
def meanwhile(call: Callable[[], Any]) -> Iterator[None]:
    """Ends once the call has, in a thread of its own."""
    failed = list[BaseException]()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    assert not failed


def until(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    while not all(each in caplog.text for each in words):
        time.sleep(0.01)


def test_whoever_waits_for_a_syncer_that_does_not_answer_says_so(alone: None, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    syncer, at = start("add")
    impatient()
    own = model()
    outside = psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), every=1, delay=0, at=at, name="a")
    moved_by(own, 1.0)
    for waits in (outside.step, outside.finish):
        caplog.clear()
        with stuck(syncer) as go_on, meanwhile(waits):
            until(caplog, f"learner a waits for fragment 0 from the syncer at tcp://{at}, for ", "it is connected, and does not answer")
            go_on()
        moved_by(own, 1.0)


def test_whoever_trains_on_beside_a_syncer_that_does_not_answer_says_so(
    alone: None, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    syncer, at = start("add")
    impatient(dead_s=0.2)
    own = model()
    outside = psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), every=1, at=at, name="a")
    with stuck(syncer) as go_on:
        moved_by(own, 1.0)
        outside.step()
        until(
            caplog,
            f"learner a trains on without an answer of the syncer at tcp://{at}, from which nothing has come for ",
            "does not answer",
        )
        go_on()
    outside.finish()


def test_whoever_waits_hears_that_the_connections_thread_has_ended(
    alone: None, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, at = model(), start("add")[1]
    outside = psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), every=1, delay=0, at=at, name="a")

    def fails(*_: Any) -> None:
        raise MemoryError("no room for it")

    monkeypatch.setattr(LearnerClient, "_send", fails)
    moved_by(own, 1.0)
    with pytest.raises(JobFailed, match=r"learner a: its connection to the syncer at .* ended by MemoryError: no room for it"):
        outside.step()
    outside._close()
    assert "its connection's thread ended" in caplog.text


def test_a_learner_that_begins_while_the_syncer_is_stuck_says_that_it_waits(
    alone: None, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    syncer, at = start("add")
    impatient()
    own, made = model(), list[psgc.Decoupled]()

    def make() -> None:
        made.append(psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), every=1, at=at, name="a"))

    with stuck(syncer) as go_on, meanwhile(make):
        until(caplog, f"learner a waits for the syncer at tcp://{at}, for ")
        go_on()
    assert "trains on" not in caplog.text
    made[0].finish()


def test_whose_initial_values_are_awaited_is_said_by_the_syncer_and_by_whoever_waits(
    alone: None, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncer, at = start("add")
    syncer._config = psgc_config(syncer._config, silence_s=0.2)
    impatient()
    real, held = LearnerClient._send, list[Any]()

    def send(client: LearnerClient, messages: Any) -> None:
        messages = list(messages)
        if client._talk.enrol.name == "bringer" and messages and messages[0].header.kind == Kind.PUSH:
            held.append((client, messages))
        else:
            real(client, messages)

    monkeypatch.setattr(LearnerClient, "_send", send)
    made = list[psgc.Decoupled]()

    def make(name: str) -> None:
        own = model()
        made.append(psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.01), every=1, at=at, name=name))

    with meanwhile(lambda: make("bringer")):
        while not held:
            pass
        with meanwhile(lambda: make("other")):
            until(
                caplog,
                f"learner other waits for fragment 0 from the syncer at tcp://{at}, for ",
                "it has no values yet, and awaits those of learner bringer",
                "learner bringer is to bring the initial values, for ",
                "0 of 1 fragments have come; learners that wait for them: 1",
            )
            client, messages = held[0]
            client._mailbox.put(real, client, messages)
    for each in made:
        each.finish()


@pytest.mark.parametrize("again", [1, 2], ids=["its own", "another process's"])
def test_nobody_waits_while_a_connection_ends_beside_which_its_learner_has_made_another(
    alone: None, start: Start, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    monkeypatch.setattr(loop_module, "SEE_OFF_S", 1e6)
    syncer, at = start("add")
    clients, go_on, ones = list[LearnerClient](), threading.Event(), np.ones(3, np.float32).view(np.uint8)

    def client(name: str, session: int) -> LearnerClient:
        enrol = Enrol(name, psgc_version, session, "none", "none", ("w [3]",), (3,))
        clients.append(LearnerClient(Config(role="worker"), f"tcp://{at}", enrol, [ones], lambda *_: ones))
        assert clients[-1].answer(0, wait=True) is not None
        return clients[-1]

    half_open, other = client("a", 1), client("b", 1)
    held(half_open._mailbox, go_on)  # nothing comes from it, not even that it closes
    client("a", again)
    other.push(0, 1, ones, ones)
    assert other.answer(0, wait=True) is not None
    assert len(syncer._leaving) == again - 1, "that connection is still there, if its process has yet to hear why it ends"
    go_on.set()
    while syncer._leaving:
        time.sleep(0.01)
    for each in clients:
        each.close()


def test_a_learner_that_is_to_go_and_does_not_is_cut_off(
    alone: None, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a 0123456789\n")
    syncer, at = start("add", learners=tokens)
    ones, go_on = np.ones(3, np.float32).view(np.uint8), threading.Event()
    enrol = Enrol("a", psgc_version, 1, "none", "none", ("w [3]",), (3,))
    frozen = LearnerClient(Config(role="worker", token="0123456789"), f"tcp://{at}", enrol, [ones], lambda *_: ones)
    assert frozen.answer(0, wait=True) is not None
    held(frozen._mailbox, go_on)
    tokens.write_text("b 0123456789\n")
    while syncer._keys:
        time.sleep(0.01)
    go_on.set()
    frozen._thread.join()
    with pytest.raises(JobFailed, match="learner a: syncer: this learner's token was revoked"):
        frozen.waits(0)
    frozen.close()


def test_a_learner_with_another_model_is_refused_in_a_line(alone: None, start: Start) -> None:
    at = start()[1]
    own, other = model(), nn.Linear(3, 2)
    first = psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.1), every=2, at=at, name="a")
    with pytest.raises(JobFailed, match="learner b has another model than this syncer: in fragment 0 parameter weight"):
        psgc.Decoupled(other, torch.optim.SGD(other.parameters(), lr=0.1), every=2, at=at, name="b")
    first.finish()


def test_learners_tokens_count_and_are_revoked_at_once(alone: None, start: Start, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("other 0123456789\n")
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=1e-4)
    at = start(learners=file)[1]
    session = psgc.current_session()
    session.config = psgc_config(session.config, token="0123456789", register_timeout_s=2.0)
    with pytest.raises(
        JobFailed, match=r"learner a: gave up after \d+ s .PSGC_REGISTER_TIMEOUT_S. without the syncer .*is psgc syncer started there"
    ) as late:
        psgc.Decoupled(own, inner, every=1, at=at, name="a")
    assert int(str(late.value).split(" s ")[0].split()[-1]) >= 2
    session.config = psgc_config(session.config, register_timeout_s=300.0)
    outside = psgc.Decoupled(own, inner, every=1, at=at, name="other")
    file.write_text("nobody 0123456789\n")
    with pytest.raises(JobFailed, match="learner other: syncer: this learner's token was revoked"):
        trained(own, outside, 10**9)
    outside._close()


def psgc_config(config: Config, **more: Any) -> Config:
    from dataclasses import replace

    return replace(config, **more)
