"""DiLoCo and its kin: what a loop by hand would do, to the bit; and numbers that do not fit each other are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import psgc.torch as psgc
from psgc.errors import CodecError, UsageError
from psgc.torch.rarely.fragment import divided
from psgc.torch.rarely.schedule import Schedule

LOOPS = ("local-sgd", "diloco", "streaming")


@pytest.mark.parametrize("servers", [1, 0])
def test_ranks_go_on_from_what_the_published_loop_makes_of_their_parameters(make_job: Callable[..., Any], servers: int) -> None:
    codecs, places = ("int4", "topk:k=0.1"), ("workers", "servers")[: 1 + servers]
    more = ("--servers",) if servers else ()
    texts = make_job(nodes=2, servers=servers).said("--codecs", *codecs, *more, job="diloco.py", PSGC_MIN_COMPRESS_BYTES="0")
    told = [{words[0]: words[1:] for line in text.splitlines() if len(words := line.split()) == 5} for text in texts]
    on_servers = [f"{name}-on-servers" for name in LOOPS if servers]
    compressed = [f"{codec}-{how}-{place}" for codec in codecs for how in ("whole", "resumed") for place in places]
    for name in (*LOOPS, *on_servers, *compressed):
        (digest, off, first, last), other = told[0][name], told[1][name]
        assert digest == other[0], f"{name}: ranks end with the same parameters"
        assert float(last) < float(first) - 0.3, f"{name}: training goes on"
        assert name not in LOOPS or float(off) == 0
        assert name not in on_servers or float(off) < 2e-6, f"{name}: {off}: torch fuses a product and a sum that servers round one by one"
    for codec in codecs:
        for place in places:
            assert told[0][f"{codec}-resumed-{place}"][0] == told[0][f"{codec}-whole-{place}"][0], (
                f"{codec}: the outer parameters, their momentum and residuals are part of what is saved"
            )
            assert told[0][f"{codec}-whole-{place}"][0] != told[0]["diloco"][0]


def test_pseudo_gradients_travel_as_in_sparseloco(make_job: Callable[..., Any]) -> None:
    texts = make_job(nodes=2, servers=1).said("--codecs", "sparseloco:k=200", job="diloco.py", PSGC_MIN_COMPRESS_BYTES="0")
    told = [{words[0]: words[1:] for line in text.splitlines() if len(words := line.split()) == 5} for text in texts]
    (whole, resumed), others = ([one[f"sparseloco:k=200-{how}-workers"] for how in ("whole", "resumed")] for one in told)
    assert whole[0] == others[0][0] == resumed[0], "ranks are alike, and the residual is part of what is saved"
    assert float(whole[3]) < float(whole[2]) - 0.2 and whole[0] != told[0]["diloco"][0]


def test_servers_take_outer_steps_only_where_there_are_some(make_job: Callable[..., Any]) -> None:
    job = make_job(nodes=2, servers=0)
    workers = job.whole("--missing-servers", job="diloco.py")
    assert job.end()[workers[0].name] == 1, job.text()
    assert 'on="servers", but this job has none: start some' in job.text()


def test_a_rank_that_runs_out_of_batches_before_the_others_is_named(make_job: Callable[..., Any]) -> None:
    job = make_job(nodes=2, servers=1)
    workers = job.whole("--uneven", job="diloco.py")
    assert job.end()[workers[0].name] == 1, job.text()
    assert "rank(s) 1 left the job" in workers[0].text
    assert "every rank must run the same number of steps" in workers[0].text


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 59))
def test_every_fragment_leaves_once_in_a_period_and_is_taken_before_it_leaves_again(every: int, fragments: int, delay: int) -> None:
    if fragments > every or delay >= every:
        with pytest.raises(UsageError):
            Schedule(every, fragments, delay)
        return
    schedule = Schedule(every, fragments, delay)
    steps = range(1, 4 * every + 1)
    left = [schedule.leaving(step) for step in steps]
    for period in (left[:every], left[every : 2 * every]):
        assert sorted(each for each in period if each is not None) == list(range(fragments))
    under_way: set[int] = set()
    for step in steps:
        taken, leaving = schedule.taken(step), schedule.leaving(step)
        if taken is not None and delay:
            under_way.remove(taken)
        if leaving is not None:
            assert leaving not in under_way
            under_way |= {leaving} if delay else set()


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.data())
def test_fragments_are_runs_of_neighbours_of_which_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    named = [(f"p{place}", torch.empty(size)) for place, size in enumerate(sizes)]
    parts = divided(named, fragments)
    assert len(parts) == fragments
    assert all(parts)
    assert [name for part in parts for name in part] == [name for name, _ in named]
    largest = max(sum(tensor.numel() for tensor in part.values()) for part in parts)
    assert largest <= sum(sizes) / fragments + max(sizes), "nearly as large as each other"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"every": 0}, "every=0, fragments=1, delay=0: expected at least 1 step"),
        ({"every": 4, "delay": 4}, "a delay of 4 steps, but a fragment leaves again after 4; choose delay < every"),
        ({"every": 2, "fragments": 3}, "3 fragments, each exchanged every 2 steps: choose every >= fragments"),
        ({"every": 9, "fragments": 5}, "5 fragments of 4 parameters; choose at most as many"),
        ({"every": 9, "fragments": 0}, "fragments=0, delay=0: expected at least 1 step and 1 fragment"),
        ({"every": 9, "mix": 1.0}, "mix=1.0: expected the share"),
        ({"every": 9, "outer": "add"}, "outer='add': expected average, or nesterov"),
        ({"every": 9, "outer": "nestorov"}, "unknown update rule 'nestorov'; did you mean nesterov?"),
        ({"every": 9, "codec": "plan.json"}, "plan.json"),
        ({"every": 9, "on": "the moon"}, "on='the moon': expected workers or servers"),
        ({"every": 9, "on": "servers", "outer": torch.optim.Adam}, "servers take average and nesterov"),
        ({"every": 9, "on": "servers", "codec": lambda name, parameter: "int8"}, "takes one codec for all parameters"),
        ({"every": 9, "fragments": [nn.ReLU()]}, "fragment 0, a ReLU, has no trained parameters of the model"),
    ],
)
def test_what_does_not_fit_is_told_in_a_line(alone: None, settings: dict[str, Any], text: str) -> None:
    own = model()
    with pytest.raises(UsageError, match=r".*") as raised:
        psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), **settings)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_codec_is_refused_when_it_is_made(alone: None) -> None:
    own = model()
    with pytest.raises(CodecError, match="unknown codec 'int5'"):
        psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=2, codec="int5")


def test_progress_is_pushed_to_servers_by_codecs_of_one_round(alone: None) -> None:
    own = model()
    for codec in ("powersgd", "int8/topk", "shared"):
        with pytest.raises(CodecError, match="changes are pushed by a codec of one round and without momentum"):
            psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=2, codec=codec, on="servers")


def test_alone_outer_steps_are_the_same_wherever_they_are_taken(alone: None) -> None:
    found = []
    for on in ("workers", "servers"):
        torch.manual_seed(3)
        own = model()
        with psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=2, delay=1, mix=0.5, on=on) as outside:  # type: ignore[arg-type]
            for _ in range(9):
                outside.zero_grad()
                own(torch.ones(1, 3)).square().sum().backward()
                outside.step()
        found.append([parameter.detach() for parameter in own.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_state_is_loaded_where_its_outer_steps_were_taken(alone: None) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    with psgc.DiLoCo(own, inner, every=2, on="servers") as outside:
        state = outside.state_dict()
        outside.load_state_dict(state)
    with psgc.DiLoCo(own, inner, every=2) as outside, pytest.raises(UsageError, match='outer steps on servers; make it with on="servers"'):
        outside.load_state_dict(state)


def test_another_block_goes_on_where_the_last_one_ended(alone: None) -> None:
    found = []
    for blocks in ((9,), (4, 5)):
        torch.manual_seed(3)
        own = model()
        outside = psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=2)
        for steps in blocks:
            with outside:
                for _ in range(steps):
                    outside.zero_grad()
                    own(torch.ones(1, 3)).square().sum().backward()
                    outside.inner.step()
        assert outside.steps == 9
        found.append([parameter.detach() for parameter in own.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_steps_after_the_block_are_told_that_nothing_is_exchanged(alone: None) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    with psgc.DiLoCo(own, inner, every=2) as outside:
        inner.step()
    for call, name in ((outside.step, "step"), (outside.finish, "finish")):
        with pytest.raises(UsageError, match=rf"DiLoCo.{name}\(\): its block was left"):
            call()
    inner.step()
    assert outside.steps == 1


def test_a_block_whose_last_exchange_fails_leaves_nothing_behind(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    other = psgc.DiLoCo(own, inner, every=2)
    failing = psgc.DiLoCo(own, inner, every=2)

    def fails() -> None:
        raise RuntimeError("the job is over")

    monkeypatch.setattr(failing, "finish", fails)
    with pytest.raises(RuntimeError, match="the job is over"), failing:
        pass
    assert not hasattr(inner, "_psgc_skipped") and not hasattr(failing, "_psgc_skipped") and len(inner._optimizer_step_post_hooks) == 1
    with other:
        pass
    assert not inner._optimizer_step_post_hooks


def test_a_process_that_is_alone_takes_outer_steps_on_its_own_progress(alone: None) -> None:
    own, before = model(), {}
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    for name, value in own.state_dict().items():
        before[name] = value.clone()
    with psgc.DiLoCo(own, inner, every=1, outer=lambda tensors: torch.optim.SGD(tensors, lr=0.5)) as outside:
        own(torch.ones(1, 3)).sum().backward()
        moved = {name: before[name] - 0.1 * parameter.grad for name, parameter in own.named_parameters() if parameter.grad is not None}
        outside.step()
    for name, value in own.state_dict().items():
        torch.testing.assert_close(value, (before[name] + moved[name]) / 2)


def test_parameters_in_half_precision_are_held_in_single(alone: None) -> None:
    own = model().bfloat16()
    with psgc.local_sgd(own, torch.optim.SGD(own.parameters(), lr=0.1), every=1) as outside:
        own(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        outside.step()
        outside.zero_grad()
        assert {tensor.dtype for fragment in outside.state_dict()["fragments"] for tensor in fragment["outer"].values()} == {torch.float32}
    assert {parameter.dtype for parameter in own.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("on", ["workers", "servers"])
def test_what_rounding_to_half_precision_takes_is_no_progress(alone: None, on: Any) -> None:
    own = model().bfloat16()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    with psgc.DiLoCo(own, inner, every=1, outer="nesterov:lr=0.7,momentum=0", on=on) as outside:

        def step() -> dict[str, torch.Tensor]:
            outside.zero_grad()
            own(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            outside.step()
            return dict(outside.state_dict()["fragments"][0]["outer"])

        moved = step()
        assert any(not torch.equal(value, value.bfloat16().float()) for value in moved.values()), "they lie beside what bfloat16 can say"
        inner.param_groups[0]["lr"] = 0.0  # from now on nothing comes further
        for _ in range(3):
            now = step()
            assert all(torch.equal(now[name], value) for name, value in moved.items())


def test_state_is_not_saved_while_a_fragment_is_under_way(alone: None) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    with psgc.DiLoCo(own, inner, every=2, delay=1) as outside:
        for _ in range(2):
            inner.step()
        with pytest.raises(UsageError, match="a fragment is under way"):
            outside.state_dict()
        inner.step()
        assert outside.state_dict()["steps"] == 3
