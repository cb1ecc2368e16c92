"""Which elements are sent: the k of largest magnitude, or those that reach a threshold, in order and without sorting.

Owns the choice, as `psgc.codecs.sparsify.largest` defines it. One pass over the part marks what reaches a guessed floor, a bit for each element, and counts
it by blocks; a scan over the blocks gives each its place, and what is marked is gathered to a list of candidates, in order. A radix selection (histograms of
eight bits of the magnitude at a time, from the top) finds the magnitude of rank k among them. Each of up to ``PROGRAMS`` programs then counts what it sends of
its share of the list, and writes it where the counts of those before it say. Where the guess let too few or too many through, the selection reads the whole
part in place of the list: the same kernels, which see that on the device, so that the host never waits.

``state`` (int64, on the device): see the constants. Keys are integers that order as the magnitudes do: the bits of |p|, or, where ``KEYED``, an
int64 for each element.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from psgc.codecs.sparsify.largest import sample_size
from psgc.cuda.common.launching import launch, rescaling
from psgc.cuda.common.scratch import Plan, planned_bytes
from psgc.cuda.sparsify.select_kernels import (
    digits_kernel,
    emit_kernel,
    floor_kernel,
    gather_kernel,
    mark_kernel,
    place_kernel,
    sample_kernel,
    tally_kernel,
)

Arrays = dict[str, torch.Tensor]
BLOCK: Final = 4096  # elements whose candidates are counted together
TILE: Final = 1024  # what a program looks at at once when it counts or writes
BINS: Final = 256
DIGIT: Final = 8  # bits that one histogram tells apart
STATES: Final = 8
PROGRAMS: Final = 1024  # at most, of a launch that goes through as many elements as the device finds there to be
SAMPLE_LEVELS: Final = 2  # histograms over the sample that find a floor for an exact choice: 16 of 31 bits
KEY_BITS: Final = 31
COUNTERS: Final[Plan] = {
    "state": (torch.int64, STATES),
    "histograms": (torch.int32, 8 * BINS),
    "sampled": (torch.int32, 4 * BINS),
}  # zeros at first


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
    """What ``choose`` needs, besides ``indices``. ``COUNTERS`` come first."""
    blocks, room = -(-numel // BLOCK) if guessed.sample else 0, max(guessed.room, 0)
    return {
        **COUNTERS,
        "keys": (torch.int64, guessed.sample),
        "places": (torch.int32, room), "found": (torch.float32, room),
        "sizes": (torch.int32, blocks), "marks": (torch.uint8, blocks * BLOCK // 8),
        "above": (torch.int32, PROGRAMS), "level": (torch.int32, PROGRAMS),
    }  # fmt: skip


def clear(scratch: torch.Tensor) -> None:
    """Zero what is counted in, at the beginning of the scratch."""
    scratch[: planned_bytes(COUNTERS)].zero_()


def find_candidates(
    source: Source, numel: int, guessed: Guess, levels: int, arrays: Arrays, status: torch.Tensor, kept: torch.Tensor | None
) -> None:
    """Fill the list of candidates; flag NaN and infinity; write p to ``kept``, unless that is None. levels: histograms over the sample."""
    state, keys, sampled, blocks = arrays["state"], arrays["keys"], arrays["sampled"], -(-numel // BLOCK)
    guesses = guessed.sample > 0
    if guesses:
        size = guessed.sample
        launch(
            sample_kernel, -(-size // TILE), *source.arguments, keys, sampled, numel, size, (size - 1).bit_length(), KEY_BITS=KEY_BITS, TILE=TILE,
            **source.constants,
        )  # fmt: skip
        for level in range(1, levels):
            launch(
                digits_kernel, -(-size // TILE), keys, None, 1, None, 1.0, None, state, sampled, size, guessed.rank, 0, -1,
                LEVEL_OF=level, KEY_BITS=KEY_BITS, KEYED=True, ONLY_WHOLE=False, DIVIDES=False, TILE=TILE,
            )  # fmt: skip
        launch(floor_kernel, 1, sampled, state, guessed.rank, 1, LEVELS=levels, KEY_BITS=KEY_BITS)
    marks, sizes = (arrays["marks"], arrays["sizes"]) if guesses else (None, None)
    launch(
        mark_kernel, blocks, *source.arguments, state, status, marks, sizes, kept, numel, BLOCK=BLOCK, num_warps=8, **source.constants
    )  # fmt: skip
    if guesses:
        launch(place_kernel, 1, sizes, state, blocks, CHUNK=8192, num_warps=16)
        launch(
            gather_kernel, blocks, *source.arguments, state, marks, sizes, arrays["places"], arrays["found"], guessed.need, guessed.room, BLOCK=BLOCK,
            **source.constants,
        )  # fmt: skip


def rank_keys(source: Source, numel: int, rank: int, guessed: Guess, key_bits: int, only_whole: bool, arrays: Arrays) -> None:
    """Fill the histograms that lead to the key of this rank. only_whole: not if the candidates are what is sent."""
    for level in range(-(-key_bits // DIGIT)):
        launch(
            digits_kernel, _programs(numel), *source.arguments, arrays["found"], arrays["state"], arrays["histograms"], numel, rank, guessed.need,
            guessed.room, LEVEL_OF=level, KEY_BITS=key_bits, KEYED=source.keyed, ONLY_WHOLE=only_whole, TILE=TILE, **source.constants,
        )  # fmt: skip


def _programs(numel: int) -> int:
    return min(-(-numel // TILE), PROGRAMS)


def emit(
    source: Source, numel: int, wanted: int, guessed: Guess, key_bits: int, arrays: Arrays, sent: torch.Tensor | None, kept: torch.Tensor | None,
    *, ranks: bool = True, sampled: bool = False,
) -> None:  # fmt: skip
    """Write what is chosen, up to ``wanted`` elements, to ``indices`` and ``sent``; take it from ``kept``, which holds p. ranks: the largest are chosen, by
    the histograms, or (sampled) all candidates unless there are too many; else what LIMIT and LEVEL say."""
    state, above, level = arrays["state"], arrays["above"], arrays["level"]
    common = {"KEYED": source.keyed, "TILE": TILE, **source.constants}
    launch(
        tally_kernel, _programs(numel), *source.arguments, arrays["found"], state, arrays["histograms"], above, level, numel, wanted, guessed.need,
        guessed.room, RANKS=ranks, SAMPLED=sampled, KEY_BITS=key_bits, **common,
    )  # fmt: skip
    launch(
        emit_kernel, _programs(numel), *source.arguments, arrays["places"], arrays["found"], state, above, level, arrays["indices"], sent, kept,
        numel, wanted, guessed.need, guessed.room, PROGRAMS=PROGRAMS, **common,
    )  # fmt: skip
