"""A worker's session over ps-lite, within one process: sums of every step, tensors' numbers, waiting and errors. Without torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psgc.config import Config
from psgc.errors import CodecError, JobFailed, UsageError
from psgc.layout import Declaration, TensorSpec
from psgc.pslite import Postoffice, Settings
from psgc.pslite.byteps.registration import Registration
from psgc.pslite.byteps.server import BytepsServer
from psgc.worker.pslite.compression import Compression
from psgc.worker.pslite.session import PsLiteSession
from tests.ports import free_port
from tests.pslite.test_offices import run_all


class Buffer:
    """An array as a bucket's memory."""

    waits = False

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.stored = threading.Event()

    def load(self) -> NDArray[Any]:
        return self.array

    def store(self, skipped: bool) -> None:
        self.stored.set()


def environment(port: int, **more: str) -> dict[str, str]:
    base = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "PSGC_WIRE": "pslite",
    }
    return {**base, "PSGC_CPU_THREADS": "1", "BYTEPS_PARTITION_BYTES": "8192", **more}


@contextmanager
def job(workers: int = 2, servers: Sequence[Callable[[Postoffice], Any]] = (BytepsServer, BytepsServer), **more: str) -> Iterator[Any]:
    """The workers' sessions, and the offices of the scheduler and the servers."""
    env = environment(free_port(), DMLC_NUM_WORKER=str(workers), DMLC_NUM_SERVER=str(len(servers)), **more)
    others = [Postoffice(Settings.of(Config.from_env(env, role=role))) for role in ("scheduler", *["server"] * len(servers))]
    for make, office in zip(servers, others[1:], strict=True):
        make(office)
    configs = [Config.from_env({**env, "DMLC_WORKER_ID": str(rank)}, role="worker") for rank in range(workers)]
    opens = [lambda each=config: PsLiteSession.open(each) for config in configs]
    sessions = run_all([*opens, *[office.start for office in others]])[:workers]
    try:
        yield sessions, others
    finally:
        if any(session.failed for session in sessions):
            for session in sessions:
                session.fail("over")
                session.close()
            run_all([lambda each=office: each.finalize(barrier=False) for office in others])
        else:
            run_all([*[session.close for session in sessions], *[office.finalize for office in others]])


def of(name: str, numel: int, dtype: str = "float32", kind: Any = "adhoc", codec: str = "none", mean: bool = False) -> Declaration:
    return Declaration(name, kind, (TensorSpec(name, (numel,), dtype),), codec, mean, min_compress_bytes=64)


def both(sessions: list[PsLiteSession], run: Callable[[PsLiteSession], Any]) -> list[Any]:
    return run_all([lambda each=session: run(each) for session in sessions])


def test_three_hundred_steps_without_a_pause_give_each_the_sum_of_its_own_step() -> None:
    with job() as (sessions, _):

        def steps(session: PsLiteSession) -> None:
            for step in range(300):
                array = np.full(3000, step + 1000 * session.rank, np.float32)  # two parts, on two servers
                session.wait([session.submit_named(of("x", 3000), Buffer(array))])
                assert (array == 2 * step + 1000).all(), (session.rank, step)

        both(sessions, steps)
        assert sessions[0].statistics()["wire_bytes"] == 2 * 300 * 12_000


def test_every_dtype_means_broadcasts_and_barriers() -> None:
    with job() as (sessions, _):

        def exchange(session: PsLiteSession) -> None:
            for dtype in ("float64", "float16", "uint8", "int8", "int16", "int32", "int64", "bool", "float32"):
                array = (np.arange(6) % 2 + session.rank).astype(dtype)
                session.wait([session.submit_named(of(dtype, 6, dtype), Buffer(array))])
                assert (array == sum((np.arange(6) % 2 + rank).astype(dtype) for rank in range(2)).astype(dtype)).all(), dtype
            bits = (np.arange(5, dtype=np.float32) + session.rank).view(np.uint32) >> 16
            array = bits.astype(np.uint16)
            session.wait([session.submit_named(of("bf16", 5, "bfloat16", mean=True), Buffer(array))])
            assert ((array.astype(np.uint32) << 16).view(np.float32) == np.arange(5) + 0.5).all()
            for declaration, wanted in ((of("m", 6, mean=True), 1.5), (of("i", 6, "int64", mean=True), 1)):
                array = np.full(6, 1 + session.rank, declaration.tensors[0].dtype)
                session.wait([session.submit_named(declaration, Buffer(array))])
                assert (array == wanted).all()
            layout = session.declare(of("b", 6, kind="broadcast"))
            array = np.full(6, 7.0 + session.rank, np.float32)
            session.wait([session.submit(layout, 0, Buffer(array), skip=session.rank != 1)])
            assert (array == 8).all(), "the root's"
            session.barrier()

        both(sessions, exchange)


def test_a_tensor_that_is_declared_again_among_others_goes_on_with_the_rounds_of_its_keys() -> None:
    """As by broadcasts from two roots: steps of the two layouts follow one another in the order of their submission."""
    with job() as (sessions, _):

        def exchange(session: PsLiteSession) -> None:
            tensors = [TensorSpec(name, (3000,), "float32") for name in "xyz"]
            layouts = [
                session.declare(Declaration(f"broadcast.m{root}", "broadcast", some, "none", False, root))
                for root, some in enumerate((tuple(tensors[:1]), (tensors[1], tensors[0], tensors[2])))
            ]
            arrays = [np.full(3000, 10.0 * step + session.rank, np.float32) for step in range(8)]
            tickets = []
            for step in range(4):
                root = step % 2
                x = session.submit(layouts[root], root, Buffer(arrays[step]), skip=session.rank != root)
                others = [session.submit(layouts[1], i, Buffer(arrays[4 + i + step // 2]), skip=session.rank != 1) for i in (0, 2) if root]
                tickets += [x, *others]
            session.wait(tickets)
            for step in range(4):
                assert (arrays[step] == 10 * step + step % 2).all()

        both(sessions, exchange)


def test_gradients_are_numbered_as_byteps_numbers_them_and_compressed_by_its_compressors() -> None:
    with job() as (sessions, _):
        names = ("w", "a", "m")
        tensors = tuple(TensorSpec(name, (1000,), "float32") for name in names)
        declaration = Declaration("optimizer0", "plan", tensors, "topk:k=0.1,ef=0", True, min_compress_bytes=64)
        rng = np.random.default_rng(0)
        values = rng.normal(size=(2, 3, 1000)).astype(np.float32)
        both(sessions, lambda session: session.expect_names(["Gradient.a", "Gradient.m", "Gradient.w", "Parameter.a"]))
        got = values.copy()

        def step(session: PsLiteSession) -> list[int]:
            layout = session.declare(declaration)
            buffers = [Buffer(got[session.rank, i]) for i in range(3)]
            session.wait([session.submit(layout, i, buffer) for i, buffer in enumerate(buffers)])
            return [session._declared.numbering.number(f"Gradient.{name}", 4000) for name in names]

        assert both(sessions, step) == [[2, 0, 1]] * 2
        registration = Registration.of({"compressor_type": "topk", "compressor_k": "0.1"})
        for i in range(3):
            compressor = registration.compressor(1000)
            total = sum(compressor.decode(compressor.encode(values[rank, i].copy())) for rank in range(2))
            wanted = compressor.decode(compressor.encode(np.asarray(total, np.float32))) / 2
            assert (got[:, i] == wanted).all()
        assert sessions[0].statistics()["gradient_bytes"] < sessions[0].statistics()["uncompressed_bytes"] / 4


def test_codecs_that_byteps_has_are_its_registrations_and_others_are_refused() -> None:
    for text, settings in (
        ("onebit", "compressor_onebit_scaling=true compressor_type=onebit"),
        ("onebit:scale=unit,ef=0", "compressor_onebit_scaling=false compressor_type=onebit"),
        ("topk:k=0.02/topk:k=0.02", "compressor_k=0.02 compressor_type=topk"), ("randomk:k=9", "compressor_k=9 compressor_type=randomk seed=5"),
        ("dithering:k=3,partition=natural,normalize=l2",
         "compressor_k=3 compressor_type=dithering dithering_normalize=1 dithering_partition=1 seed=5"),
    ):  # fmt: skip
        registration = Compression(text, 5).registration
        assert registration is not None and " ".join("=".join(pair) for pair in registration.settings) == settings
    assert Compression("none", 0).registration is None
    for text in ("int8", "onebit/none", "topk:k=0.1,select=sampled", "powersgd:rank=4", "onebit:scale=row"):
        with pytest.raises(CodecError, match=rf"codec {text.split(':')[0]}.*"):
            Compression(text, 0)


def test_different_tensors_on_ranks_end_the_job_with_the_difference_and_no_rank_hangs(caplog: pytest.LogCaptureFixture) -> None:
    with job(PSGC_SILENCE_S="0.2") as (sessions, others), caplog.at_level(logging.WARNING):

        def run(session: PsLiteSession) -> str:
            with pytest.raises(JobFailed) as raised:
                session.declare(of("x", 10 + session.rank))
            return str(raised.value)

        def time_goes_by() -> None:
            """The limit of a step is over once a server has seen what both have declared."""
            while not any(office.error for office in others[1:]):
                threading.Event().wait(0.01)
            for session in sessions:
                session._waits._timeout_s = 0.6

        for text in run_all([*(lambda each=session: run(each) for session in sessions), time_goes_by])[:2]:
            assert "the first push of tensor 'x' of all workers has not come" in text and "see the servers' output" in text
        errors = [str(office.error) for office in others[1:] if office.error]
        assert len(errors) == 1 and "all workers must declare the same tensors in the same order" in errors[0]


def test_calls_that_ps_lite_has_nothing_for_are_refused_with_what_to_use() -> None:
    with job() as (sessions, _):
        for call in (
            lambda: sessions[0].publish("a", b"b"), lambda: sessions[0].lookup("a"),
            lambda: sessions[0].remembered(None, False),  # type: ignore[arg-type]
        ):  # fmt: skip
            with pytest.raises(UsageError, match="use psgc's own wire for it"):
                call()
        both(sessions, lambda session: session.declare(of("x", 10)))
        with pytest.raises(UsageError, match="'x' was declared before"):
            sessions[0].declare(of("x", 11))
        with pytest.raises(CodecError, match="gradients travel by BytePS's codecs"):
            sessions[0].declare(of("y", 100, codec="int8"))
