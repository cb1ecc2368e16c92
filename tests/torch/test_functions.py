"""A pair of torch functions as a codec: servers forward what they write, and every worker reads all of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psgc.torch as psgc
from psgc.codecs import Stream, parse_codec, parse_pair, parse_scheme
from psgc.codecs.codec import Codec
from psgc.codecs.common import script_functions as known
from psgc.errors import CodecError, PayloadError, UsageError

MANUAL = Path(__file__).parents[2] / "docs" / "writing-a-codec.md"
STREAM = Stream(0, 1, 0, 0)
ITEMS = (
    torch.arange(6, dtype=torch.int64).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 4), b"bytes", bytearray(b""),
    torch.tensor([True, False]), torch.ones(3, dtype=torch.float16)[::2], torch.full((2,), 7, dtype=torch.uint8),
)  # fmt: skip


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is registered in a test is forgotten after it."""
    registered: dict[str, Any] = {}
    monkeypatch.setattr(known, "_registered", registered)
    return registered


def as_is(p: torch.Tensor) -> tuple[torch.Tensor]:
    return (p,)


def back(items: tuple[Any, ...], numel: int) -> torch.Tensor:
    return items[0]


def pushed(name: str) -> Codec:
    return parse_scheme(f"{name}/relay").rounds(10)[0].pair.push


def encode(codec: Codec, grad: Any, residual: Any = None) -> Any:
    out = np.zeros(codec.payload_bound(grad.size), np.uint8)
    return out[: codec.encode(grad, residual, 0.5, STREAM, out).payload_bytes]


@pytest.mark.usefixtures("names")
def test_every_kind_of_item_comes_back_as_it_was() -> None:
    got: list[Any] = []

    def read(items: tuple[Any, ...], numel: int) -> torch.Tensor:
        got.extend(items)
        return torch.zeros(numel)

    psgc.register_functions("items", lambda _: ITEMS, read)
    codec = pushed("items")
    codec.decode(encode(codec, np.ones(5, np.float32)), 5, 0, 5, np.empty(5, np.float32))
    for item, was in zip(got, ITEMS, strict=True):
        if isinstance(was, torch.Tensor):
            assert (item.dtype, item.shape, item.tolist()) == (was.dtype, was.shape, was.tolist())
        else:
            assert item == bytes(was)


@pytest.mark.usefixtures("names")
def test_every_truncated_or_longer_payload_is_refused() -> None:
    psgc.register_functions("items", lambda _: ITEMS, lambda _, numel: torch.zeros(numel))
    codec, out = pushed("items"), np.empty(5, np.float32)
    payload = encode(codec, np.ones(5, np.float32))
    for wrong in [payload[:size] for size in range(payload.size)] + [np.append(payload, np.uint8(0))]:
        with pytest.raises(PayloadError, match="items payload of"):
            codec.decode(wrong, 5, 0, 5, out)


@pytest.mark.usefixtures("names")
def test_what_was_not_sent_stays_in_the_residual() -> None:
    psgc.register_functions("coarse", lambda p: (p.round(),), back, feedback=True)
    codec, rng = pushed("coarse"), np.random.default_rng(0)
    grad, residual = (rng.standard_normal(100).astype(np.float32) for _ in range(2))
    p = grad + np.float32(0.5) * residual
    payload, sent = encode(codec, grad, residual), np.empty(100, np.float32)
    codec.decode(payload, 100, 0, 100, sent)
    codec.commit(payload, 100, 0, 100, grad, residual, 0.5)
    assert sent.tobytes() == p.round().tobytes()
    assert residual.tobytes() == (p - p.round()).tobytes()


@pytest.mark.usefixtures("names")
def test_nan_is_flagged_and_never_reaches_the_functions() -> None:
    psgc.register_functions("whole", as_is, back)
    codec, out = pushed("whole"), np.zeros(5000, np.uint8)
    encoded = codec.encode(np.array([1, np.nan, np.inf], np.float32), None, 1.0, STREAM, out)
    assert encoded.nonfinite
    assert codec.reference_elements(out[: encoded.payload_bytes].tobytes(), 3).tolist() == [1, 0, 0]


@pytest.mark.usefixtures("names")
def test_a_server_knows_the_bound_from_the_text_and_needs_no_functions(names: dict[str, Any]) -> None:
    psgc.register_functions("mine", as_is, back, bytes_per_element=0.25, extra_bytes=10, feedback=True)
    scheme = parse_scheme("mine/relay")
    assert scheme.canonical == "functions:bytes_per_element=0.25,ef=1,extra_bytes=10,name=mine/relay"
    names.clear()
    there = parse_scheme(scheme.canonical)
    assert (there.canonical, there.push_bound(1000), there.feedback) == (scheme.canonical, 260, True)
    push = there.rounds(8)[0].pair.push
    push.validate(np.zeros(12, np.uint8), 8)
    with pytest.raises(PayloadError, match="mine payload of 8 elements: 13 bytes, at most 12 were declared"):
        push.validate(np.zeros(13, np.uint8), 8)
    with pytest.raises(CodecError, match="codec mine: its functions are not registered in this process"):
        encode(push, np.ones(8, np.float32))


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("parse", [parse_codec, parse_pair, parse_scheme])
def test_without_relay_they_are_refused(parse: Callable[[str], Any]) -> None:
    psgc.register_functions("mine", as_is, back)
    for text in ("mine", "functions:name=mine"):
        with pytest.raises(CodecError, match=r"its functions exist in the trainer only, so servers cannot decode it; write '.*/relay'"):
            parse(text)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("text", ["none/mine", "mine/none", "mine/int8"])
def test_servers_neither_answer_with_them_nor_decode_them(text: str) -> None:
    psgc.register_functions("mine", as_is, back)
    with pytest.raises(CodecError, match="write 'mine/relay'"):
        parse_scheme(text)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("int8", {}, "there is one of this name already"),
        ("relay", {}, "there is one of this name already"),
        ("a/b", {}, "letters, digits and underscores"),
        ("", {}, "letters, digits and underscores"),
        ("mine", {"bytes_per_element": 0.0}, "at least 0.001 and 0 expected"),
        ("mine", {"bytes_per_element": float("nan")}, "at least 0.001 and 0 expected"),
        ("mine", {"extra_bytes": -1}, "at least 0.001 and 0 expected"),
    ],
)
def test_names_and_bounds_that_cannot_be_are_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(CodecError, match=words):
        psgc.register_functions(name, as_is, back, **arguments)


@pytest.mark.usefixtures("names")
def test_a_name_is_given_once_and_takes_no_parameters() -> None:
    psgc.register_functions("mine", as_is, back)
    with pytest.raises(CodecError, match="codec mine: there is one of this name already"):
        psgc.register_functions("mine", as_is, back)
    with pytest.raises(CodecError, match="takes no parameters, got k"):
        parse_scheme("mine:k=3/relay")


@pytest.mark.usefixtures("names")
def test_the_canonical_text_means_the_same() -> None:
    psgc.register_functions("mine", as_is, back, bytes_per_element=1)
    canonical = parse_scheme("mine/relay").canonical
    assert parse_scheme(canonical).canonical == canonical == "functions:bytes_per_element=1.0,name=mine/relay"


@pytest.mark.parametrize("text", ["functions", "functions:name=a,extra_bytes=x", "functions:name=a,bytes_per_element=inf"])
def test_text_that_no_worker_writes_is_refused(text: str) -> None:
    with pytest.raises(CodecError, match="codec functions"):
        parse_scheme(f"{text}/relay")


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("compress", "decompress", "words"),
    [
        (lambda p: 1 / 0, back, "codec mine: compress failed: ZeroDivisionError"),
        (lambda p: p, back, "compress gave Tensor, expected a tuple"),
        (lambda p: (1.0,), back, "compress gave float in its tuple"),
        (lambda p: (p.to(torch.complex64),), back, "compress gave a tensor of complex64"),
        (lambda p: (p, p), back, "compress wrote 93 bytes for 10 elements, but at most 1 an element and 50 more were declared"),
        (as_is, lambda items, numel: items[1], "decompress failed: IndexError"),
        (as_is, lambda items, numel: items[0][1:], "decompress gave 9 elements, expected a tensor of 10"),
        (as_is, lambda items, numel: None, "decompress gave NoneType"),
    ],
)  # fmt: skip
def test_functions_that_do_wrong_are_named(compress: Any, decompress: Any, words: str) -> None:
    psgc.register_functions("mine", compress, decompress, bytes_per_element=1, extra_bytes=50)
    codec, out = pushed("mine"), np.empty(10, np.float32)
    with pytest.raises(CodecError, match=words):
        codec.decode(encode(codec, np.ones(10, np.float32)), 10, 0, 10, out)


JOB = """
numel, steps = 200_000, 12
grads = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(psgc.size())]
residuals, received = [torch.zeros(numel) for _ in grads], torch.zeros(numel)
for step in range(steps):
    got = psgc.push_pull(grads[psgc.rank()], name="x", compression="mine/relay")
    p = [grad + residual for grad, residual in zip(grads, residuals)]
    sent = [decompress(compress(x), numel) for x in p]
    residuals = [x - m for x, m in zip(p, sent)]
    received += got
    assert torch.equal(got, (sent[0] + sent[1]) / 2), (step, (got - (sent[0] + sent[1]) / 2).abs().max())
print("right", int((received != 0).sum()) > numel // 50)
psgc.shutdown()
"""


def test_a_job_runs_the_pages_functions_in_relay_mode(make_job: Callable[..., Any], tmp_path: Path) -> None:
    found = re.search(r"```python\n# train\.py\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(found[1] + JOB)
    job = make_job(nodes=2, servers=1, env={"PYTHONPATH": str(Path(__file__).parents[2])})
    workers = job.whole(job=str(script))
    assert set(job.end().values()) == {0}, job.text()
    assert all("right True" in worker.text for worker in workers), job.text()


def test_functions_that_fail_in_a_job_end_it_by_name(make_job: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, psgc.torch as psgc\npsgc.init()\n"
        "psgc.register_functions('mine', lambda p: (p[5:],), lambda items, numel: items[0])\n"
        "psgc.push_pull(torch.ones(100), name='x', compression='mine/relay')\n"
    )
    job = make_job(nodes=2, servers=1, env={"PYTHONPATH": str(Path(__file__).parents[2])})
    workers = job.whole(job=str(script))
    assert all(job.end().values()), job.text()
    assert all("codec mine: decompress gave 95 elements" in worker.last_line for worker in workers), job.text()


@pytest.mark.parametrize(("pair", "which"), [((None, back), "compress"), ((as_is, b"bytes"), "decompress")])
def test_what_is_no_function_is_refused_at_once(names: dict[str, Any], pair: Any, which: str) -> None:
    with pytest.raises(UsageError, match=rf"register_functions: {which} of 'mine' is a (NoneType|bytes), expected a function"):
        psgc.register_functions("mine", *pair)
    assert not names
