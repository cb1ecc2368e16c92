"""Which elements are sent: the k of largest magnitude, or those that reach a threshold, in order and without sorting.

Owns the choice, as `psgc.codecs.sparsify.largest` defines it. One pass over the part appends what reaches a guessed floor to a list of
candidates, each block of ``BLOCK`` elements in one piece. A radix selection (histograms of eight bits of the magnitude at a time, from the
top) finds the magnitude of rank k among them. Each block then counts what it sends, a scan gives its place in the payload, and it writes its
elements there. Where the guess let too few or too many through, the selection reads the whole part in place of the list: the same kernels, which
see that on the device, so that the host never waits.

``state`` (int64, on the device): see the constants. Keys are integers that order as the magnitudes do: the bits of |p|, or, where ``KEYED``, an
int64 for each element.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from psgc.codecs.sparsify.largest import sample_size
from psgc.cuda.common.launching import launch, rescaling
from psgc.cuda.common.scratch import Plan
from psgc.cuda.sparsify.select_kernels import (
    arrange_kernel,
    collect_kernel,
    digits_kernel,
    emit_kernel,
    floor_kernel,
    rank_kernel,
    sample_kernel,
    tally_kernel,
)

Arrays = dict[str, torch.Tensor]
BLOCK: Final = 4096  # elements whose candidates lie together
TILE: Final = 1024  # of these, what a program looks at at once when it counts or writes
BINS: Final = 256
DIGIT: Final = 8  # bits that one histogram tells apart
STATES: Final = 8
PROGRAMS: Final = 1024  # at most, of a launch that goes through as many elements as the device finds there to be
SAMPLE_LEVELS: Final = 2  # histograms over the sample that find a floor for an exact choice: 16 of 31 bits
KEY_BITS: Final = 31


class Source(NamedTuple):
    """What is chosen from: values / divisor + rescale * residual, or, ``keyed``, int64 keys."""

    values: torch.Tensor
    residual: torch.Tensor | None = None
    rescale: float | torch.Tensor = 1.0
    divisor: int = 1
    keyed: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of the kernels."""
        return self.values, self.residual, self.divisor, *rescaling(self.rescale)

    @property
    def constants(self) -> dict[str, bool]:
        """Of the kernels."""
        return {"DIVIDES": self.divisor != 1}


class Guess(NamedTuple):
    """How candidates are found. sample: elements of it, 0 for no candidates at all. rank: in the sample, of the floor. need, room: fewest and most
    candidates that are of use."""

    sample: int
    rank: int
    need: int
    room: int


NO_GUESS: Final = Guess(0, 1, 0, -1)  # the choice is made from the whole part


def guess(numel: int, k: int) -> Guess:
    """A floor that at least k elements very likely reach, as ``largest`` guesses it on the CPU; any guess leads to the same choice."""
    size, share = sample_size(numel, k), k / numel
    mean = size * share
    rank = mean + 4 * (mean * (1 - share)) ** 0.5 + 8
    if size == numel or rank > 0.9 * size:
        return NO_GUESS
    return Guess(size, int(rank), k, min(numel, int(numel / size * (rank + 5 * rank**0.5))))


def selection_plan(numel: int, guessed: Guess) -> Plan:
    """What ``choose`` needs, besides ``indices``. The first array has to be zeros."""
    blocks, room = -(-numel // BLOCK), max(guessed.room, 0)
    return {
        "state": (torch.int64, STATES),
        "histograms": (torch.int32, 8 * BINS),
        "sampled": (torch.int32, 4 * BINS),
        "keys": (torch.int64, guessed.sample),
        "places": (torch.int32, room), "found": (torch.float32, room),
        "starts": (torch.int64, blocks), "sizes": (torch.int32, blocks),
        "above": (torch.int32, blocks), "level": (torch.int32, blocks), "targets": (torch.int64, blocks),
    }  # fmt: skip


def clear(arrays: Arrays) -> None:
    """Zero what ``choose`` counts in."""
    for name in ("state", "histograms", "sampled"):
        arrays[name].zero_()


def find_candidates(
    source: Source, numel: int, guessed: Guess, levels: int, arrays: Arrays, status: torch.Tensor, kept: torch.Tensor | None
) -> None:
    """Fill the list of candidates; flag NaN and infinity; write p to ``kept``, unless that is None. levels: histograms over the sample."""
    state, keys, sampled = arrays["state"], arrays["keys"], arrays["sampled"]
    if guessed.sample:
        size = guessed.sample
        launch(
            sample_kernel, -(-size // TILE), *source.arguments, keys, numel, size, (size - 1).bit_length(), TILE=TILE, **source.constants
        )  # fmt: skip
        for level in range(levels):
            launch(
                digits_kernel, -(-size // TILE), keys, None, 1, None, 1.0, None, state, sampled, size, guessed.rank, 0, -1,
                LEVEL_OF=level, KEY_BITS=KEY_BITS, KEYED=True, ONLY_WHOLE=False, DIVIDES=False, TILE=TILE,
            )  # fmt: skip
        launch(floor_kernel, 1, sampled, state, guessed.rank, 1, LEVELS=levels, KEY_BITS=KEY_BITS)
    launch(
        collect_kernel, -(-numel // BLOCK), *source.arguments, state, status, arrays["places"], arrays["found"], arrays["starts"], arrays["sizes"],
        kept, numel, guessed.room, BLOCK=BLOCK, num_warps=8, **source.constants,
    )  # fmt: skip


def rank_keys(source: Source, numel: int, rank: int, guessed: Guess, key_bits: int, only_whole: bool, arrays: Arrays) -> None:
    """Fill the histograms that lead to the key of this rank. only_whole: not if the candidates are what is sent."""
    programs = min(-(-numel // TILE), PROGRAMS)
    for level in range(-(-key_bits // DIGIT)):
        launch(
            digits_kernel, programs, *source.arguments, arrays["found"], arrays["state"], arrays["histograms"], numel, rank, guessed.need,
            guessed.room, LEVEL_OF=level, KEY_BITS=key_bits, KEYED=source.keyed, ONLY_WHOLE=only_whole, TILE=TILE, **source.constants,
        )  # fmt: skip


def emit(
    source: Source, numel: int, wanted: int, guessed: Guess, arrays: Arrays, sent: torch.Tensor | None, kept: torch.Tensor | None
) -> None:  # fmt: skip
    """Write what LIMIT and LEVEL choose, up to ``wanted`` elements, to ``indices`` and ``sent``; take it from ``kept``, which holds p."""
    blocks = -(-numel // BLOCK)
    state, starts, sizes, above, level, targets = (arrays[name] for name in ("state", "starts", "sizes", "above", "level", "targets"))
    common = {"KEYED": source.keyed, "BLOCK": BLOCK, "TILE": TILE, **source.constants}
    launch(
        tally_kernel, blocks, *source.arguments, arrays["found"], state, starts, sizes, above, level, numel, guessed.need, guessed.room, **common
    )  # fmt: skip
    launch(arrange_kernel, 1, above, level, targets, state, blocks, wanted, CHUNK=4096, num_warps=8)
    launch(
        emit_kernel, blocks, *source.arguments, arrays["places"], arrays["found"], state, starts, sizes, level, targets, arrays["indices"], sent, kept,
        numel, guessed.need, guessed.room, **common,
    )  # fmt: skip


def choose_largest(source: Source, numel: int, k: int, guessed: Guess, key_bits: int, arrays: Arrays, *, sampled: bool = False) -> None:
    """Set LIMIT and LEVEL to the k largest, or (sampled) to all candidates unless there are too many."""
    rank_keys(source, numel, k, guessed, key_bits, sampled, arrays)
    launch(
        rank_kernel, 1, arrays["histograms"], arrays["state"], k, guessed.need, guessed.room, KEY_BITS=key_bits, SAMPLED=sampled
    )  # fmt: skip
