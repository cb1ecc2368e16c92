"""Payload bytes never change under an id: they are compared with stored ones."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from psgc.codecs.registry import parse_codec, registered_aliases, registered_codecs
from psgc.codecs.table import ROWS, Row

FOLDER = Path(__file__).parents[1] / "golden" / "codecs"
RECIPE = runpy.run_path(str(FOLDER / "regenerate.py"))
RETIRED = ("tbq.push.bin", "tbq.pull.bin")  # of tau=auto, which nothing writes any more
NAMES = [f"{text.replace(':', '-').replace('=', '')}.{way}.bin" for text in RECIPE["CODECS"] for way in ("push", "pull")]


@pytest.fixture(scope="module")
def made() -> dict[str, bytes]:
    payloads: dict[str, bytes] = RECIPE["golden_payloads"]()
    return payloads


@pytest.mark.parametrize("name", NAMES)
def test_payload_is_the_golden_one(name: str, made: dict[str, bytes]) -> None:
    assert (FOLDER / name).is_file(), f"{name} is missing: restore it from version control"
    assert made[name] == (FOLDER / name).read_bytes()


def test_every_golden_file_is_compared(made: dict[str, bytes]) -> None:
    assert {path.name for path in FOLDER.glob("*.bin")} == {*made, *RETIRED}


def test_every_codec_has_golden_payloads() -> None:
    assert {text.partition(":")[0] for text in RECIPE["CODECS"]} == {*registered_codecs(), *registered_aliases()}


def test_a_retired_threshold_is_decoded_as_it_was() -> None:
    """tbq:tau=auto wrote the mean magnitude of each block as its scale: the id's bytes, though no codec chooses it now."""
    codec, numel, elements = parse_codec("tbq"), RECIPE["NUMEL"], np.empty(RECIPE["NUMEL"], np.float32)
    for name in ("tbq.push.bin", "tbq.pull.bin"):
        payload = np.fromfile(FOLDER / name, np.uint8)
        codec.validate(payload, numel)
        codec.decode(payload, numel, 0, numel, elements)
        assert np.array_equal(elements, codec.reference_elements(payload.tobytes(), numel))
        scales = np.repeat(payload[: 4 * -(-numel // 256)].view(np.float32), 256)[:numel]
        assert set(np.unique(elements / np.where(scales > 0, scales, 1))) == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("row", [row for row in ROWS if row.retired], ids=lambda row: row.text)
def test_an_alias_has_the_payload_the_server_pass_and_the_random_draws_of_its_codec(row: Row) -> None:
    made = RECIPE["golden_payloads"]([row.retired])
    file = row.retired.replace(":", "-").replace("=", "")
    for direction in ("push", "pull"):
        assert made[f"{file}.{direction}.bin"] == (FOLDER / f"{row.text}.{direction}.bin").read_bytes(), "stored when it was a codec"


@pytest.mark.parametrize("text", RECIPE["CODECS"])
def test_golden_payloads_are_valid_and_decode(text: str) -> None:
    codec, numel = parse_codec(text), RECIPE["NUMEL"]
    payload = np.fromfile(FOLDER / (text.replace(":", "-").replace("=", "") + ".push.bin"), np.uint8)
    codec.validate(payload, numel)
    out = np.empty(numel, np.float32)
    codec.decode(payload, numel, 0, numel, out)
    p = RECIPE["golden_input"](0) + np.float32(RECIPE["RESCALE"] if codec.feedback else 0) * RECIPE["golden_input"](90)
    assert not codec.feedback or np.square(out - p).sum() < np.square(p).sum()  # a contraction, as error feedback needs
