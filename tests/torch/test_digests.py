"""Broadcasts between nodes: ranks compare digests first, and only tensors that differ travel."""

from __future__ import annotations

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
from psgc.errors import PsgcError
from psgc.torch.tensors import digests as digests_module
from psgc.torch.tensors.broadcast import MOST_LAYOUTS, broadcast_tensors
from psgc.torch.tensors.declaring import spec_of
from psgc.torch.tensors.digests import LANES, digests, unequal
from psgc.worker.session import DIGESTS_OF, OF_BROADCASTS
from tests.torch.small_models import seeded

SIZES = (0, 1, 7, 8, 9, 63, 4097)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex64)


def digest(tensor: torch.Tensor, name: str = "a", threads: int = 1) -> bytes:
    return digests([tensor], [spec_of(tensor, name, name)], threads).tobytes()


def drawn(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (8 * torch.randn(numel, generator=torch.Generator().manual_seed(numel))).to(dtype)


# a digest is of a tensor's bits, and of what it is


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_equal_bits_have_one_digest_and_any_flipped_bit_another(dtype: torch.dtype, numel: int) -> None:
    tensor = drawn(numel, dtype)
    before = digest(tensor)
    assert len(before) == 16 and digest(tensor.clone()) == before
    octets = torch.view_as_real(tensor).view(torch.uint8) if tensor.is_complex() else tensor.view(torch.uint8)
    flat = octets.reshape(-1)
    for place in {0, flat.numel() // 2, flat.numel() - 1} if numel else ():
        flat[place] ^= 1
        assert digest(tensor) != before
        flat[place] ^= 1
    assert digest(tensor) == before


def test_zeros_of_both_signs_and_nans_of_other_payloads_differ() -> None:
    bits = [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000]
    tensors = [torch.tensor([pattern], dtype=torch.int64).to(torch.int32).view(torch.float32) for pattern in bits]
    assert len({digest(tensor) for tensor in tensors}) == len(bits)
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))


def test_names_dtypes_and_shapes_count() -> None:
    zeros = torch.zeros(2, 6)
    kinds = [zeros, zeros.reshape(6, 2), zeros.reshape(12), zeros.to(torch.int32), torch.zeros(12, 1), torch.zeros(1, dtype=torch.float32)]
    assert len({digest(kind) for kind in kinds}) == len(kinds)
    assert digest(zeros, "a") != digest(zeros, "b")


def test_strides_do_not_count() -> None:
    matrix = drawn(4097 * 3, torch.float32).reshape(4097, 3)
    across = matrix.t()
    assert not across.is_contiguous() and digest(across) == digest(across.contiguous())
    assert digest(across[:, ::2]) == digest(across[:, ::2].contiguous())


def test_every_byte_of_every_piece_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests_module, "PIECE_BYTES", 16)
    found = {digest(torch.zeros(100, dtype=torch.uint8).index_fill(0, torch.tensor(place), 1)) for place in range(100)}
    assert len(found | {digest(torch.zeros(100, dtype=torch.uint8))}) == 101


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_and_pieces_of_any_number_give_the_digests_of_one_thread(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(digests_module, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(digests_module, "SINGLE_MAX_BYTES", 0)
    tensors = [drawn(numel, dtype) for numel in (*SIZES, 20_000) for dtype in DTYPES]
    specs = [spec_of(tensor, str(place), "a tensor") for place, tensor in enumerate(tensors)]
    alone, several = digests(tensors, specs), digests(tensors, specs, threads)
    assert alone.shape == (len(tensors), LANES) and alone.dtype == np.int64 and np.array_equal(alone, several)
    assert len({row.tobytes() for row in alone}) == len(tensors)


# all ranks find the same


@given(data=st.data(), ranks=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65]), rows=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
def test_every_rank_finds_the_tensors_in_which_any_rank_differs(data: st.DataObject, ranks: int, rows: int, seed: int) -> None:
    """Held against the definition, which looks at all ranks' digests; sums are modulo 2 ** 64, as servers and groups add."""
    kinds = np.random.default_rng(seed).integers(-(2**63), 2**63, (3, rows, LANES), np.int64)  # up to three different models
    of = [[data.draw(st.sampled_from([0, 0, 1, 2])) for _ in range(rows)] for _ in range(ranks)]
    own = [np.array([kinds[kind, row] for row, kind in enumerate(kinds_of)], np.int64).reshape(rows, LANES) for kinds_of in of]
    sums = np.sum(own, axis=0, dtype=np.int64)
    wanted = [row for row in range(rows) if any(not np.array_equal(one[row], own[0][row]) for one in own)]
    assert [unequal(sums, one, ranks) for one in own] == [wanted] * ranks


@pytest.mark.parametrize("lane", range(LANES))
def test_one_lane_that_differs_is_enough(lane: int) -> None:
    own = np.full((1, LANES), 2**63 - 1, np.int64)
    other = own.copy()
    other[0, lane] -= 1
    assert unequal(own + own, own, 2) == []
    assert unequal(own + other, own, 2) == unequal(own + other, other, 2) == [0]


# in a job


def model_of(seed: int) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), seed)


def sent(ranks: Any) -> list[tuple[str, ...]]:
    """Names of the tensors of each step of a broadcast itself, as rank 0 submitted them."""
    return [step.tensors for step in ranks.steps if not step.layout.startswith(OF_BROADCASTS)]


def test_nothing_travels_but_digests_where_all_ranks_have_the_same(ranks_apart: Any) -> None:
    def work(rank: int) -> str:
        model = model_of(0)
        versions = [tensor._version for tensor in model.state_dict().values()]
        psgc.broadcast_parameters(model.state_dict())
        assert [tensor._version for tensor in model.state_dict().values()] == versions
        return str(model.state_dict())

    assert ranks_apart.run(3, work) == [str(model_of(0).state_dict())] * 3
    assert sent(ranks_apart) == [] and len(ranks_apart.steps) == 1


@pytest.mark.parametrize("other", [0, 1, 2])
@pytest.mark.parametrize("root", [0, 2])
def test_what_any_rank_has_otherwise_travels_alone(ranks_apart: Any, other: int, root: int) -> None:
    def work(rank: int) -> str:
        tensors = {name: torch.arange(5.0) for name in "abcd"}
        tensors["c"][2] = 7.0 if rank == other else -7.0
        psgc.broadcast_parameters(tensors, root)
        return str(tensors)

    assert set(ranks_apart.run(3, work)) == {
        str({name: torch.tensor([0.0, 1.0, (7.0 if root == other else -7.0) if name == "c" else 2.0, 3.0, 4.0]) for name in "abcd"})
    }
    assert sent(ranks_apart) == [("c",)]


def test_bits_count_where_numbers_are_equal(ranks_apart: Any) -> None:
    patterns = {"zero": (0, -(2**31)), "nan": (0x7FC00000, 0x7FC00001), "one": (0x3F800000, 0x3F800000)}

    def work(rank: int) -> list[int]:
        tensors = {name: torch.tensor([of[rank]], dtype=torch.int32).view(torch.float32) for name, of in patterns.items()}
        psgc.broadcast_parameters(tensors)
        return [int(tensor.view(torch.int32)) for tensor in tensors.values()]

    assert ranks_apart.run(2, work) == [[of[0] for of in patterns.values()]] * 2
    assert {name for names in sent(ranks_apart) for name in names} == {"zero", "nan"}


def test_layouts_stay_few_however_often_others_differ(ranks_apart: Any) -> None:
    names = [f"t{number}" for number in range(2 * MOST_LAYOUTS)]

    def work(rank: int) -> None:
        for _ in range(2):
            for name in names:
                tensors = {each: torch.tensor([float(rank * (each == name))]) for each in names}
                psgc.broadcast_parameters(tensors)
                assert not any(tensors.values()), name
        psgc.broadcast_parameters(tensors)

    ranks_apart.run(2, work)
    travelled = sent(ranks_apart)
    alone = [(name,) for name in names[:MOST_LAYOUTS]]
    assert [one for one in travelled if len(one) == 1] == alone * 2
    assert [one for one in travelled if len(one) > 1] == [tuple(names)] * 2 * MOST_LAYOUTS
    assert len({step.layout for step in ranks_apart.steps if not step.layout.startswith(OF_BROADCASTS)}) == 1 + MOST_LAYOUTS


@pytest.mark.parametrize("change", ["shape", "dtype", "name", "number"])
def test_other_tensors_are_refused_in_the_line_of_ranks_on_one_node(ranks: Any, change: str) -> None:
    def work(rank: int) -> None:
        first = torch.ones(2 + (change == "shape" and rank), dtype=torch.float64 if change == "dtype" and rank else torch.float32)
        tensors = {"b" if change == "name" and rank else "a": first, "c": torch.ones(2)}
        psgc.broadcast_parameters({**tensors, "d": torch.ones(1)} if change == "number" and rank else tensors)

    said = []
    for ranks.apart in (False, True):
        with pytest.raises(PsgcError) as caught:
            ranks.run(2, work)
        said.append(re.sub(r"rank \d .*", "", str(caught.value)))
    assert said[0] == said[1] and "digests" not in said[1] and ("tensor" in said[1]), said


def trained(seed: int, steps: int) -> Any:
    model = model_of(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6.0).reshape(2, 3)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("seeds", "steps", "travels"), [((0, 0), (2, 2), False), ((0, 1), (2, 2), True), ((0, 0), (2, 0), True), ((0, 0), (0, 2), False)]
)
def test_an_optimizers_state_travels_where_a_rank_has_another(ranks_apart: Any, seeds: Any, steps: Any, travels: bool) -> None:
    def work(rank: int) -> str:
        optimizer = trained(seeds[rank], steps[rank])
        psgc.broadcast_optimizer_state(optimizer)
        return str(optimizer.state_dict())

    first, second = ranks_apart.run(2, work)
    assert first == second == str(trained(seeds[0], steps[0]).state_dict())
    assert any(name.startswith("state.") for names in sent(ranks_apart) for name in names) == travels


def test_the_wrapper_of_models_begins_without_sending_equal_parameters(ranks_apart: Any) -> None:
    def work(rank: int) -> None:
        model = psgc.DistributedDataParallel(model_of(0))
        model(torch.ones(2, 3))  # its buffers are sent as they are: they nearly always differ

    ranks_apart.run(2, work)
    layouts = [step.layout for step in ranks_apart.steps]
    assert layouts == [
        f"{DIGESTS_OF}broadcast.model0.0.{len(model_of(0).state_dict())}",
        *["broadcast.model0.buffers.0"] * (len(layouts) - 1),
    ]
    assert len(layouts) > 1


@pytest.mark.parametrize("settings", [{}, {"on_worker_loss": "wait"}, {"wire": "pslite"}], ids=["one node", "followed", "BytePS's wire"])
def test_where_ranks_do_not_compare_everything_travels(ranks: Any, settings: dict[str, Any]) -> None:
    ranks.apart = bool(settings)
    ranks.run(2, lambda rank: broadcast_tensors([("a", torch.ones(3)), ("b", torch.ones(3))], 0, "all."), **settings)
    assert [name for step in ranks.steps for name in step.tensors] == ["a", "b"]


# over real links


@pytest.mark.parametrize("servers", [1, 0])
def test_equal_parameters_take_next_to_no_bytes_and_one_that_differs_its_own(make_job: Callable[..., Any], servers: int) -> None:
    texts = make_job(nodes=2, servers=servers).said(job=str(Path(__file__).parent / "job_apart.py"), PSGC_TRANSPORT="tcp")
    found = [dict(re.findall(r"^(\w[\w ]*): (\d+) bytes$", text, re.MULTILINE)) for text in texts]
    for of in found:
        moved = {case: int(count) for case, count in of.items()}
        assert moved["equal"] < 2000 and moved["equal again"] < 2000, moved
        assert 400_000 < moved["one differs"] < 830_000, moved  # a rank sends it, or receives it, or both
        assert 4_500_000 < moved["all differ"] < 9_100_000, moved
        assert moved["equal states"] < 30_000, moved  # their description, in messages of 4 KiB
        assert moved["diloco"] < 2000, moved


def test_a_rank_with_another_number_of_tensors_ends_the_job_with_the_line_that_names_it(make_job: Callable[..., Any]) -> None:
    job = make_job(nodes=2, servers=1)
    workers = job.whole("more", job=str(Path(__file__).parent / "job_apart.py"))
    job.end()
    assert [worker.popen.returncode for worker in workers] == [1, 1], job.text()
    line = r"tensor 'more' is on rank 1 but not on rank 0 \(declared as broadcast.Parameter.0\); build the same model everywhere"
    assert all(re.search(line, worker.text) for worker in workers), job.text()
