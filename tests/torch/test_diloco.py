"""DiLoCo and its kin: what a loop by hand would do, to the bit; and numbers that do not fit each other are told."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import psgc.torch as psgc
from psgc.errors import CodecError, UsageError
from psgc.torch.rarely.fragment import divided, parts_of
from psgc.torch.rarely.schedule import Schedule

LOOPS = ("local-sgd", "diloco", "streaming", "always-travelling")
HOWS = ("", "streaming-")


@pytest.mark.parametrize("servers", [1, 0])
def test_ranks_go_on_from_what_the_published_loop_makes_of_their_parameters(make_job: Callable[..., Any], servers: int) -> None:
    codecs, places = ("int4", "topk:k=0.1"), ("workers", "servers")[: 1 + servers]
    more = ("--servers",) if servers else ()
    texts = make_job(nodes=2, servers=servers).said("--codecs", *codecs, *more, job="diloco.py", PSGC_MIN_COMPRESS_BYTES="0")
    told = [{words[0]: words[1:] for line in text.splitlines() if len(words := line.split()) == 5} for text in texts]
    on_servers = [f"{name}-on-servers" for name in LOOPS if servers]
    compressed = [f"{codec}-{how}whole-{place}" for codec in codecs for how in HOWS for place in places]
    for name in (*LOOPS, *on_servers, *compressed):
        (digest, off, first, last), other = told[0][name], told[1][name]
        assert digest == other[0], f"{name}: ranks end with the same parameters"
        assert float(last) < float(first) - 0.2, f"{name}: training goes on"
        assert name not in LOOPS or float(off) == 0
        assert name not in on_servers or float(off) < 2e-6, f"{name}: {off}: torch fuses a product and a sum that servers round one by one"
    for codec in codecs:
        for place, how in [(place, how) for place in places for how in HOWS]:
            whole, saved, resumed = (told[0][f"{codec}-{how}{run}-{place}"][0] for run in ("whole", "saved", "resumed"))
            assert whole == saved, f"{codec}: saving changes nothing, whatever is under way"
            assert whole == resumed, f"{codec}: outer parameters, their momentum, residuals and what is under way are part of what is saved"
        assert told[0][f"{codec}-whole-{places[0]}"][0] != told[0]["diloco"][0]


def test_random_numbers_go_on_in_another_job_with_outer_steps_on_servers(make_job: Callable[..., Any], tmp_path: Path) -> None:
    digests = []
    for how, seed in (("whole", "7"), ("resumed", "8")):
        texts = make_job(nodes=2, servers=1).said(
            "--drawn", how, str(tmp_path), "randomk:k=0.1", job="diloco.py", PSGC_MIN_COMPRESS_BYTES="0", PSGC_SEED=seed
        )
        digests.append([line.split()[1] for text in texts for line in text.splitlines() if line.startswith("drawn ")])
    assert digests[0] == digests[1] and len(set(digests[0])) == 1


def test_buffers_are_rank_0s_also_those_that_are_not_saved(make_job: Callable[..., Any]) -> None:
    texts = make_job(nodes=2, servers=1).said("--features", job="diloco.py")
    first, second = ({words[0]: words[1] for line in text.splitlines() if len(words := line.split()) == 5} for text in texts)
    assert first["workers"] == first["servers"] == second["workers"] == second["servers"]


def test_pseudo_gradients_travel_as_in_sparseloco(make_job: Callable[..., Any]) -> None:
    texts = make_job(nodes=2, servers=1).said("--codecs", "sparseloco:k=200", job="diloco.py", PSGC_MIN_COMPRESS_BYTES="0")
    told = [{words[0]: words[1:] for line in text.splitlines() if len(words := line.split()) == 5} for text in texts]
    (whole, resumed), others = ([one[f"sparseloco:k=200-{how}-workers"] for how in ("whole", "resumed")] for one in told)
    assert whole[0] == others[0][0] == resumed[0], "ranks are alike, and the residual is part of what is saved"
    assert float(whole[3]) < float(whole[2]) - 0.2 and whole[0] != told[0]["diloco"][0]


def test_sites_exchange_the_pieces_of_a_model_that_is_sharded_within_each(make_job: Callable[..., Any]) -> None:
    texts = make_job(nodes=4, servers=1).said(job="diloco_sharded.py", PSGC_MIN_COMPRESS_BYTES="0")
    told = [{words[0]: words[1:] for line in text.splitlines() if len(words := line.split()) == 4} for text in texts]
    assert all(of_rank["whole-evaluated"] == of_rank["whole-int4"] for of_rank in told), "evaluations change nothing"
    for how, more in (("whole", ["whole-delayed"]), ("parts", [])):
        for name in (how, f"{how}-int4", f"{how}-resumed", *more):
            digests = [of_rank[name][0] for of_rank in told]
            assert digests[0] == digests[2] != digests[1] == digests[3], f"{name}: both sites hold the same two pieces"
            assert all(of_rank[name][2] == "True" for of_rank in told)
        assert all(float(of_rank[how][1]) < 2e-6 for of_rank in told), "as the loop does to whole parameters, but for how torch vectorizes"
        assert all(of_rank[f"{how}-int4"] == of_rank[f"{how}-resumed"] and of_rank[how][0] != of_rank[f"{how}-int4"][0] for of_rank in told)


def test_pieces_are_refused_where_the_ranks_that_exchange_hold_different_ones(make_job: Callable[..., Any]) -> None:
    for text in make_job(nodes=4, servers=1).said("--refused", job="diloco_sharded.py"):
        told = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        assert "is a DTensor of which the ranks that exchange hold different pieces; join by psgc.init(mesh=mesh, dim=" in told["diloco"]
        assert told["servers"].startswith("DiLoCo(on=\"servers\"): parameter '0.weight' is a DTensor")
        assert told["demo"].startswith("DeMo: parameter '0.weight' is a DTensor, and DeMo takes whole parameters; its squares would be cut")
        assert told["decoupled"].startswith("Decoupled: parameter '0.weight' is a DTensor, and Decoupled takes whole parameters")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("every", r"DiLoCo: rank ([01]) has every=5, .* and rank ([23]) has every=6,"),
        ("uneven", r"DiLoCo: rank ([23]) has finished, .* where others exchange \(rank ([0123]) is at its step (?:10|7)\)"),
    ],
)
def test_sites_that_differ_are_told_by_the_jobs_ranks(make_job: Callable[..., Any], what: str, text: str) -> None:
    job = make_job(nodes=4, servers=1)
    workers = job.whole("--apart", what, job="diloco_sharded.py")
    statuses = job.end()
    assert all(statuses[worker.name] for worker in workers), job.text()
    found = {pair for worker in workers for pair in re.findall(text, worker.text)}
    assert found and all(int(one) % 2 == int(other) % 2 for one, other in found), f"peers hold the same pieces: {job.text()}"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("fragments", "tensor '2.weight' is on rank 0 but not on rank 1 (declared as diloco0.0)"),
        ("codec", "codec on rank 0 is int4, on rank 1 it is int8 (declared as diloco0.0)"),
        (
            "every",
            "DiLoCo: rank 0 has every=1000, delay=0, mix=0, outer=nesterov:lr=0.7,momentum=0.9, on=workers, and rank 1 has every=999,",
        ),
        ("every --servers", "lr=0.7,momentum=0.9, on=servers, and rank 1 has every=999,"),
        ("model", "shape of tensor '0.weight' on rank 0 is (40, 12), on rank 1 it is (41, 12)"),
    ],
)
def test_ranks_that_differ_are_told_when_it_is_made(make_job: Callable[..., Any], what: str, text: str) -> None:
    job = make_job(nodes=2, servers=1)
    workers = job.whole("--apart", *what.split(), job="diloco.py", PSGC_MIN_COMPRESS_BYTES="0")
    assert job.end()[workers[0].name] == 1, job.text()
    assert text in job.text(), job.text()


@pytest.mark.parametrize("on", [[], ["--servers"]], ids=["workers", "servers"])
def test_a_rank_that_exchanges_a_nan_ends_the_job_where_that_is_asked_for(make_job: Callable[..., Any], on: list[str]) -> None:
    job = make_job(nodes=2, servers=1)
    workers = job.whole("--nonfinite", *on, job="diloco.py", PSGC_NONFINITE="raise")
    assert job.end()[workers[0].name] == 1, job.text()
    assert "'0.weight' holds NaN or infinity in its step " in job.text() and "PSGC_NONFINITE=raise" in job.text()


def test_a_codec_that_needs_servers_is_refused_when_it_is_made(make_job: Callable[..., Any]) -> None:
    job = make_job(nodes=2, servers=0)
    workers = job.whole("--refused", "sparseloco", job="diloco.py", PSGC_MIN_COMPRESS_BYTES="0")
    job.end()
    for worker in workers:
        assert "refused: DiLoCo: tensor '0.weight': codec sparseloco" in worker.text, job.text()


def test_servers_take_outer_steps_only_where_there_are_some(make_job: Callable[..., Any]) -> None:
    job = make_job(nodes=2, servers=0)
    workers = job.whole("--missing-servers", job="diloco.py")
    assert job.end()[workers[0].name] == 1, job.text()
    assert 'on="servers", but this job has none: start some' in job.text()


def test_a_rank_that_runs_out_of_batches_before_the_others_is_named(make_job: Callable[..., Any]) -> None:
    job = make_job(nodes=2, servers=1)
    workers = job.whole("--uneven", job="diloco.py")
    assert job.end()[workers[0].name] == 1, job.text()
    for worker in workers:  # of both, which both see, the first to end is heard by the other
        assert "DiLoCo: rank 1 has finished, by finish() or at the end of the block, where others exchange (rank " in worker.text, (
            job.text()
        )
        assert "every rank must run the same number of steps" in worker.text


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
        ({"every": 9, "fragments": 0}, "fragments=0: expected at least 1 fragment, or a list of modules"),
        ({"every": 9, "fragments": -3}, "fragments=-3: expected at least 1 fragment"),
        ({"every": 9, "mix": 1.0}, "mix=1.0: expected the share"),
        ({"every": 100 / 3}, "DiLoCo: every=33.333333333333336: expected a whole number, such as total // 3"),
        ({"every": 9, "delay": 2.5}, "DiLoCo: delay=2.5: expected a whole number"),
        ({"every": 9, "fragments": 2.0}, "DiLoCo: fragments=2.0: expected a whole number"),
        ({"every": 9, "fragments": ["0"]}, "DiLoCo: fragment 0 is a str: expected a number, or a list of modules of the model"),
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


def test_one_diloco_at_a_time_counts_an_optimizers_steps(alone: None) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    first = psgc.DiLoCo(own, inner, every=2)
    inner.step()
    with pytest.raises(UsageError, match=r"another DiLoCo counts this optimizer's steps, and has some to exchange; call its finish\(\)"):
        psgc.DiLoCo(own, inner, every=2)
    first.finish()
    second = psgc.DiLoCo(own, inner, every=2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(own(torch.ones(1, 3)).sum() * float("inf")).backward()
    scaler.step(inner)  # is skipped, and counts
    assert (first.steps, second.steps) == (1, 1)
    with pytest.raises(UsageError, match="or another DiLoCo took its place"):
        first.step()
    with pytest.raises(UsageError, match="has some to exchange"), first:
        pass
    second.finish()
    with first:
        inner.step()
    assert (first.steps, second.steps) == (2, 1)


def test_two_dilocos_of_one_model_are_refused_whatever_optimizers_they_count(alone: None) -> None:
    own = model()
    matrices, rest = ([p for p in own.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    inner, beside = torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(rest, lr=0.1)
    first, second = psgc.DiLoCo(own, beside, every=4), psgc.DiLoCo(own, inner, every=4)
    apart = model()
    with psgc.DiLoCo(apart, torch.optim.SGD(apart.parameters(), lr=0.1), every=4) as other:
        beside.step()
        other.step()  # of another model
    text = "DiLoCo: another DiLoCo has steps of another optimizer to exchange, of some of the same parameters"
    with pytest.raises(UsageError, match=text):
        inner.step()
    first.finish()
    inner.step()
    with pytest.raises(UsageError, match=text):
        beside.step()
    second.finish()


def test_one_that_was_given_up_amid_its_steps_is_in_nobodys_way(alone: None) -> None:
    own = model()
    given_up = psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=4)
    given_up.step()
    with psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=4) as after:
        after.step()
        with pytest.raises(UsageError, match="another DiLoCo has steps of another optimizer"):
            given_up.step()


def test_a_step_that_calls_its_parents_is_one(alone: None) -> None:
    """torch calls the hooks of both once it has made one of the parent's."""

    class Parent(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Child(Parent):
        fails = False

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.fails:
                raise ValueError("out of memory")

    own = model()
    inner = Child(own.parameters(), lr=0.1)
    with psgc.DiLoCo(own, inner, every=100) as outside:
        inner.step()
        Parent(own.parameters(), lr=0.1)
        inner.step()
        torch.optim.SGD(own.parameters(), lr=0.1)
        inner.step()
        assert outside.steps == 3
        inner.fails = True
        for _ in range(2):
            with pytest.raises(ValueError, match="out of memory"):
                inner.step()
        inner.fails = False
        before = outside.steps
        for _ in range(3):
            inner.step()
        assert outside.steps == before + 3


def test_steps_count_after_one_that_has_raised_whatever_else_torch_has_hooked(alone: None) -> None:
    """AdamW has Adam's step(): once each has been made, torch calls hooks around both, and only one of them runs."""

    def fails() -> float:
        raise ValueError("no batch")

    own = model()
    inner = torch.optim.AdamW(own.parameters(), lr=0.1)
    with psgc.DiLoCo(own, inner, every=100) as outside:
        torch.optim.Adam(own.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="no batch"):
            inner.step(fails)
        for _ in range(3):
            inner.step()
        assert outside.steps == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
@pytest.mark.parametrize("on", ["workers", "servers"])
def test_a_state_goes_with_torch_compile_and_without(alone: None, on: Any) -> None:
    own = model()
    compiled = torch.compile(own)
    assert [list(part) for part in parts_of(own, 2, "a")] == [list(part) for part in parts_of(compiled, 2, "a")], (
        "a syncer's fragments, too"
    )
    for one, other in ((own, compiled), (compiled, own)):
        with psgc.DiLoCo(one, torch.optim.SGD(one.parameters(), lr=0.1), every=2, fragments=2, on=on) as outside:
            outside.step()
            state = outside.state_dict()
        with psgc.DiLoCo(other, torch.optim.SGD(other.parameters(), lr=0.1), every=2, fragments=2, on=on) as outside:
            outside.load_state_dict(state)
            assert outside.steps == 1


@pytest.mark.parametrize("on", ["workers", "servers"])
def test_what_is_trained_after_finish_has_another_diloco(alone: None, on: Any) -> None:
    own = model()
    frozen = own.get_parameter("2.weight").requires_grad_(False)
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    outside = psgc.DiLoCo(own, inner, every=2, on=on)
    inner.step()
    outside.finish()
    frozen.requires_grad_(True)
    outside = psgc.DiLoCo(own, inner, every=2, on=on)
    for _ in range(3):
        inner.step()
    outside.finish()


def test_whole_numbers_of_numpy_are_numbers(alone: None) -> None:
    own = model()
    with psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=np.int64(4), fragments=np.int32(2), delay=np.int8(1)) as outside:  # type: ignore[arg-type]
        for _ in range(9):
            outside.step()
    assert len(outside.state_dict()["fragments"]) == 2


def test_a_mean_that_is_not_finite_is_said_once(alone: None, caplog: pytest.LogCaptureFixture) -> None:
    own = model()
    with psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=1) as outside:
        outside.step()
        assert not caplog.messages
        with torch.no_grad():
            own.get_parameter("2.bias")[0] = float("nan")
        for _ in range(3):
            outside.step()
    (text,) = caplog.messages
    assert "of 1 parameter(s) holds NaN or infinity, of which some rank's has it, first '2.bias'" in text
    assert "PSGC_NONFINITE=raise ends the job instead" in text


def test_a_state_that_is_kept_in_memory_stays_as_it_was(alone: None) -> None:
    def step() -> None:
        outside.zero_grad()
        own(torch.ones(1, 3)).square().sum().backward()
        outside.step()

    own = model()
    outside = psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=1)
    for _ in range(3):
        step()
    kept = outside.state_dict(), copy.deepcopy(own.state_dict())
    found = []
    for _ in range(3):
        outside.load_state_dict(kept[0])
        own.load_state_dict(kept[1])
        for _ in range(3):
            step()
        found.append([parameter.detach().clone() for parameter in own.parameters()])
    assert all(torch.equal(one, other) for again in found[1:] for one, other in zip(found[0], again, strict=True))


@pytest.mark.parametrize("on", ["workers", "servers"])
@pytest.mark.parametrize("steps", [3, 4], ids=["within-a-round", "after-an-exchange"])
def test_a_state_gives_a_rank_its_own_parameters_and_buffers_back(alone: None, on: Any, steps: int) -> None:
    """Rank 0's have taken their place when it was made."""
    own = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).bfloat16()
    own.register_buffer("mask", torch.ones(4).expand(4, 4), persistent=False)  # which nobody can write to
    own.register_buffer("table", torch.eye(2).to_sparse(), persistent=False)
    outside = psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=2, on=on)
    for _ in range(steps):
        outside.zero_grad()
        own(torch.randn(4, 3, dtype=torch.bfloat16)).square().sum().backward()
        outside.step()
    state, wanted = outside.state_dict(), copy.deepcopy(own.state_dict())
    assert (state["fragments"][0]["own"] is None) == (steps == 4), "what the outer parameters say already takes no room"
    with torch.no_grad():
        for value in own.state_dict().values():
            value.zero_()
    outside.load_state_dict(state)
    for name, value in own.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert state["buffers"].keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    outside.finish()


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
    assert not any(hasattr(each, "_psgc_skipped") for each in (inner, failing)) and not inner._optimizer_step_post_hooks
    assert not hasattr(inner, "_psgc_counter")
    with other:
        assert len(inner._optimizer_step_post_hooks) == 1
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


def streamed(every: int, fragments: int, delay: int, mix: float, steps: int) -> list[float]:
    """What becomes of parameters that move by -0.1 a step, one in each fragment, alone, by the published algorithm in plain numbers: at the end what is
    under way is taken, and what a rank has beyond the outer parameters is its own, whose mean over one rank it is."""
    outer, own, momentum, left = ([0.0] * fragments for _ in range(4))
    travels: dict[int, float] = {}

    def receive(each: int, keep: float) -> None:
        gradient = travels.pop(each)
        momentum[each] = 0.9 * momentum[each] + gradient
        outer[each] -= 0.7 * (gradient + 0.9 * momentum[each])
        own[each] = outer[each] + keep * (own[each] - outer[each])

    for step in range(1, steps + 1):
        for each in range(fragments):
            own[each] -= 0.1
            if each in travels and step == left[each] + delay:
                receive(each, mix)
            if step % every == (each + 1) * every // fragments % every:
                travels[each], left[each] = outer[each] - own[each], step
                if not delay:
                    receive(each, mix)
    for each in range(fragments):
        if each in travels:
            receive(each, mix)
    return own


def scalars(count: int) -> nn.Module:
    own = nn.Module()
    for each in range(count):
        own.register_parameter(f"p{each}", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    return own


STREAMS = [(4, 2, 0, 0.0), (4, 2, 0, 0.5), (5, 1, 2, 0.0), (5, 1, 2, 0.5), (6, 3, 4, 0.25), (6, 3, 2, 0.0), (3, 1, 0, 0.0)]


@pytest.mark.parametrize("on", ["workers", "servers"])
@pytest.mark.parametrize(("every", "fragments", "delay", "mix"), STREAMS)
def test_the_end_takes_what_is_under_way_and_no_outer_step(
    alone: None, every: int, fragments: int, delay: int, mix: float, on: Any
) -> None:
    for steps in (0, 1, *range(17, 26)):
        own = scalars(fragments)
        inner = torch.optim.SGD(own.parameters(), lr=0.1)
        with psgc.DiLoCo(own, inner, every=every, fragments=fragments, delay=delay, mix=mix, on=on, codec="none") as outside:
            for _ in range(steps):
                for parameter in own.parameters():
                    parameter.grad = torch.ones_like(parameter)
                inner.step()
            outside.finish()  # and once more when the block is left, which is to change nothing
        wanted = streamed(every, fragments, delay, mix, steps)
        found = [float(parameter.detach()) for parameter in own.parameters()]
        assert found == pytest.approx(wanted, abs=1e-9), f"{steps} steps"


@pytest.mark.parametrize("on", ["workers", "servers"])
def test_a_mean_between_two_exchanges_changes_nothing_of_them(alone: None, on: Any) -> None:
    for every, fragments, mix in ((4, 2, 0.0), (4, 2, 0.5), (5, 1, 0.0)):
        found = []
        for asks in (False, True):
            own = scalars(fragments)
            inner = torch.optim.SGD(own.parameters(), lr=0.1)
            outside = psgc.DiLoCo(own, inner, every=every, fragments=fragments, mix=mix, on=on)
            for _ in range(17):
                for parameter in own.parameters():
                    parameter.grad = torch.ones_like(parameter)
                inner.step()
                if asks:
                    outside.finish()
            outside.finish()
            found.append([float(parameter.detach()) for parameter in own.parameters()])
        assert found[0] == pytest.approx(found[1], abs=1e-9)


@pytest.mark.parametrize("on", ["workers", "servers"])
@pytest.mark.parametrize(("every", "fragments", "delay", "mix"), STREAMS)
def test_a_run_that_is_interrupted_after_any_step_goes_on_bit_for_bit(
    alone: None, every: int, fragments: int, delay: int, mix: float, on: Any
) -> None:
    def start(width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, psgc.DiLoCo]:
        torch.manual_seed(3)
        own = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))
        inner = torch.optim.SGD(own.parameters(), lr=0.1)
        return own, inner, psgc.DiLoCo(own, inner, every=every, fragments=fragments, delay=delay, mix=mix, on=on)

    def step(own: nn.Module, inner: torch.optim.Optimizer) -> None:
        inner.zero_grad()
        own(torch.ones(1, 3)).square().sum().backward()
        inner.step()

    whole, inner, outside = start()
    for _ in range(13):
        step(whole, inner)
    outside.finish()
    for at in range(14):
        own, inner, outside = start()
        for _ in range(at):
            step(own, inner)
        saved = copy.deepcopy((outside.state_dict(), own.state_dict()))
        step(own, inner)  # is lost
        other, inner, resumed = start()
        step(other, inner)  # is overwritten, with what of it is under way
        other.load_state_dict(saved[1])
        resumed.load_state_dict(saved[0])
        for _ in range(13 - at):
            step(other, inner)
        resumed.finish()
        for one, wanted in zip(other.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one, wanted), f"interrupted after {at} steps"


def test_what_was_frozen_and_is_trained_later_is_refused_before_the_next_exchange(alone: None) -> None:
    own = model()
    frozen = own.get_parameter("2.weight").requires_grad_(False)
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    outside = psgc.DiLoCo(own, inner, every=2)
    for _ in range(3):
        inner.step()
    frozen.requires_grad_(True)
    with pytest.raises(UsageError, match=r"parameter '2.weight' is trained now, and was frozen when DiLoCo was made"):
        inner.step()
    with pytest.raises(UsageError, match=r"'2.weight' is trained now"):
        outside.finish()


def test_what_was_trained_and_is_frozen_later_is_refused_before_momentum_moves_it(alone: None) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    outside = psgc.DiLoCo(own, inner, every=2)
    frozen = own.get_parameter("2.weight").requires_grad_(False)
    was = frozen.clone()
    inner.step()
    with pytest.raises(
        UsageError, match=r"'2.weight' is frozen now, and was trained when DiLoCo was made.*call finish\(\) before it is frozen"
    ):
        inner.step()
    assert torch.equal(frozen, was)
    frozen.requires_grad_(True)
    outside.finish()


def test_a_parameter_that_comes_later_is_refused_before_the_next_exchange(alone: None) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    outside = psgc.DiLoCo(own, inner, every=1)
    inner.step()
    own.adapter = nn.Linear(2, 2, bias=False)
    inner.add_param_group({"params": own.adapter.parameters()})
    for call in (inner.step, outside.finish):
        with pytest.raises(UsageError, match=r"DiLoCo: parameter 'adapter.weight' was not the model's when DiLoCo was made") as raised:
            call()
        assert "\n" not in str(raised.value)


def test_a_parameter_that_is_replaced_is_refused_before_the_next_exchange(alone: None) -> None:
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    psgc.DiLoCo(own, inner, every=1)
    own.load_state_dict(copy.deepcopy(own.state_dict()), assign=True)
    with pytest.raises(UsageError, match=r"parameter '0.weight' was not the model's when DiLoCo was made"):
        inner.step()


def test_a_parameter_of_the_optimizer_that_is_not_the_models_is_refused(alone: None) -> None:
    own, other = model(), nn.Parameter(torch.ones(3))
    text = r"DiLoCo: parameter 0 of the inner optimizer's group 1, of shape \[3\], is not the model's"
    both = torch.optim.SGD([{"params": own.parameters()}, {"params": [other]}], lr=0.1)
    with pytest.raises(UsageError, match=text):
        psgc.DiLoCo(own, both, every=1)
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    psgc.DiLoCo(own, inner, every=1)
    inner.add_param_group({"params": [other]})
    with pytest.raises(UsageError, match=text):
        inner.step()


@pytest.mark.parametrize("codec", ["int4", lambda name, parameter: "int4", "powersgd"])
def test_a_codec_that_cannot_carry_the_parameters_is_refused_when_it_is_made(alone: None, codec: Any) -> None:
    own = nn.Linear(400, 400).double()
    with pytest.raises(CodecError, match=r"^DiLoCo: (tensor|parameter) '(weight|bias)': .*float64"):
        psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=2, codec=codec)


def test_complex_parameters_are_refused_in_its_own_words(alone: None) -> None:
    own = nn.Module()
    own.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(UsageError, match=r"parameter 'weight' is torch.complex64: DiLoCo holds float parameters only"):
        psgc.DiLoCo(own, torch.optim.SGD(own.parameters(), lr=0.1), every=2)


class WithMore(nn.Linear):
    """Says of itself what is no tensor."""

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        del state


@pytest.mark.parametrize("on", ["workers", "servers"])
def test_what_modules_say_of_themselves_besides_their_tensors_stays_with_each_rank(alone: None, on: Any) -> None:
    own = WithMore(3, 3)
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    with psgc.DiLoCo(own, inner, every=2, on=on) as outside:
        inner.step()
    assert outside.steps == 1
