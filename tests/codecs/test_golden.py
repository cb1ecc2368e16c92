"""Payload bytes never change under an id: they are compared with stored ones."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from psgc.codecs.registry import parse_codec, registered_codecs

FOLDER = Path(__file__).parents[1] / "golden" / "codecs"
RECIPE = runpy.run_path(str(FOLDER / "regenerate.py"))
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
    assert {path.name for path in FOLDER.glob("*.bin")} == set(made)


def test_every_codec_has_golden_payloads() -> None:
    assert {text.partition(":")[0] for text in RECIPE["CODECS"]} == set(registered_codecs())


@pytest.mark.parametrize("text", RECIPE["CODECS"])
def test_golden_payloads_are_valid_and_decode(text: str) -> None:
    codec, numel = parse_codec(text), RECIPE["NUMEL"]
    payload = np.fromfile(FOLDER / (text.replace(":", "-").replace("=", "") + ".push.bin"), np.uint8)
    codec.validate(payload, numel)
    out = np.empty(numel, np.float32)
    codec.decode(payload, numel, 0, numel, out)
    p = RECIPE["golden_input"](0) + np.float32(RECIPE["RESCALE"] if codec.feedback else 0) * RECIPE["golden_input"](90)
    assert not codec.feedback or np.square(out - p).sum() < np.square(p).sum()  # a contraction, as error feedback needs
