"""The interface of schemes. A scheme says how a part is synchronised: in one round by a pair of codecs, or in several rounds.

A *round* is one exchange: every worker pushes a payload, the server folds and answers. To the server each round of a part is a key like
any other, with its own codecs and number of elements; the worker's ``SchemeState`` connects the rounds. Owns these two
interfaces; ``registry`` finds a scheme by its text form. Knows no sockets, keys or threads.

| text                  | rounds                                                                                     |
|-----------------------|--------------------------------------------------------------------------------------------|
| ``push`` / ``push/pull`` | one: workers encode with ``push``, servers decode, sum and encode with ``pull``            |
| ``push/relay``        | one: servers forward what the workers pushed, and every worker decodes and sums it          |
| ``shared:...``        | two: the largest magnitudes, then integers in a common scale that add up without decoding    |
| ``powersgd:...``      | two: the factors P and Q of a low-rank approximation                                        |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from psgc.codecs.codec import BLOCK, F32, MAX_PART, Array, Bytes, Codec, CodecPair, Encoded, Stream
from psgc.codecs.common.sources import digest_suffix
from psgc.codecs.common.texts import join_text
from psgc.errors import CodecError

ResidualDtype = Literal["float32", "int8"]


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange. numel: elements of its payloads. divides: whether a mean is taken by the server in this round."""

    pair: CodecPair
    numel: int
    divides: bool = True


@dataclass(frozen=True, slots=True)
class BucketContext:
    """The properties of a bucket that a scheme may depend on. shapes: those of the bucket's tensors, in order; mean: whether the aggregate is the mean
    or the sum."""

    dtype: str = "float32"
    workers: int = 1
    mean: bool = True
    shapes: tuple[tuple[int, ...], ...] = ()


class SchemeState(ABC):
    """One worker's state of one part: it encodes and applies the rounds of the part's steps. Not thread-safe.

    ``grad``, ``target`` (the same memory) and ``residual`` are the part's; ``sent`` are this worker's payloads of the step, by round.
    """

    rounds: tuple[Round, ...]

    @abstractmethod
    def encode(self, index: int, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        """Write round ``index``'s payload of ``grad + rescale * residual``; changes neither."""

    def take(self, index: int, payload: Bytes) -> None:
        """Take the result of a round that is not the last. Raises PayloadError."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, payload: Bytes, sent: Sequence[Bytes], target: Array, residual: F32 | None, rescale: float) -> None:
        """Take the last round's result: write the aggregate to ``target``, and what was not sent of the gradient to ``residual`` (None: nothing to
        commit). Raises PayloadError."""

    @abstractmethod
    def add_back(self, sent: Sequence[Bytes], residual: F32) -> None:
        """Add the decoded payloads of this worker's last step to ``residual``, because the trainer did not apply that step."""

    @property
    def saved(self) -> F32 | None:
        """The state of each element besides the residual, float32 [numel], in gradient units, for checkpoints; None if there is none."""
        return None

    def restore(self, saved: F32) -> None:
        """Continue from what ``saved`` of another state returned."""
        raise NotImplementedError

    @property
    def factors(self) -> dict[int, F32]:
        """State that is the same on all ranks, kept between steps: flat arrays, by their tensor's first element in the part."""
        return {}

    def restore_factors(self, factors: Mapping[int, F32]) -> None:  # noqa: B027 - most states have none
        """Continue from another state's ``factors``. Factors that are missing or of another size start anew."""


class Scheme(ABC):
    """A scheme with its parameters. Immutable. One with a name of its own has ``name``, ``from_parameters`` and ``parameters``."""

    name: ClassVar[str] = ""
    whole: bool = False  # a bucket is not cut into parts
    defaults: ClassVar[Mapping[str, str]] = {}  # every parameter it takes, with its default
    residual_dtype: ResidualDtype = "float32"  # how a worker keeps its residual
    advice: ClassVar[str] = ""  # when to use it, in one line; every scheme with a name of its own has one

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], context: BucketContext) -> Scheme:
        """Build from the text form's parameters. Raises CodecError naming scheme and parameter."""
        raise NotImplementedError

    @property
    def parameters(self) -> dict[str, str]:
        """Parameters in canonical text, those at their default left out."""
        return {}

    @property
    def canonical(self) -> str:
        """The text form that is printed, compared and sent: ``name:k=v,...``; of another package's scheme ``name@digest:k=v,...``."""
        return join_text(self.name + digest_suffix(type(self), Scheme), self.parameters)

    @property
    @abstractmethod
    def feedback(self) -> bool:
        """Whether a worker keeps a residual."""

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of the decoded values is the encoded value."""
        return False

    @property
    def additive(self) -> bool:
        """Whether servers sum the payloads of every round without decoding them."""
        return False

    @property
    def cut_anywhere(self) -> bool:
        """Whether results are the same, bit for bit, into whichever parts a tensor is cut at multiples of BLOCK."""
        return False

    @property
    def device_codecs(self) -> tuple[Codec, ...]:
        """The codecs whose GPU sides a worker's state on a GPU calls; none where its kernels are the scheme's own."""
        return ()

    @property
    def array_dtype(self) -> Any:
        """NumPy dtype of ``grad`` and ``target``."""
        return np.float32

    @property
    def flags_nonfinite(self) -> bool:
        """Whether encoding reports NaN and infinity."""
        return True

    @abstractmethod
    def rounds(self, numel: int) -> tuple[Round, ...]:
        """The rounds of a part of ``numel`` elements."""

    @abstractmethod
    def new_state(self, numel: int) -> SchemeState:
        """A worker's state for one part."""

    def push_bound(self, numel: int) -> int:
        """Most bytes that a worker pushes for a part in one step."""
        return sum(round_.pair.push.payload_bound(round_.numel) for round_ in self.rounds(numel))

    def warm(self) -> None:
        """Compile or load the kernels of every round."""
        for round_ in self.rounds(BLOCK):
            round_.pair.push.warm()
            round_.pair.pull.warm()


class PairScheme(Scheme):
    """One round, by two codecs."""

    def __init__(self, pair: CodecPair) -> None:
        self.pair = pair

    @property
    def canonical(self) -> str:
        return self.pair.canonical

    @property
    def feedback(self) -> bool:
        return self.pair.push.feedback

    @property
    def unbiased(self) -> bool:
        return self.pair.push.unbiased and self.pair.pull.unbiased

    @property
    def additive(self) -> bool:
        return self.pair.push.additive and self.pair.pull.additive

    @property
    def cut_anywhere(self) -> bool:
        return self.pair.push.cut_anywhere and self.pair.pull.cut_anywhere

    @property
    def device_codecs(self) -> tuple[Codec, ...]:
        return self.pair.push, self.pair.pull

    @property
    def array_dtype(self) -> Any:
        push, pull = self.pair.push.array_dtype, self.pair.pull.array_dtype
        return push if push == pull else np.float32  # `none` carries 16-bit parts as they are; beside a lossy codec, it takes float32, too

    @property
    def flags_nonfinite(self) -> bool:
        return self.pair.push.flags_nonfinite

    def rounds(self, numel: int) -> tuple[Round, ...]:
        return (Round(self.pair, numel),)

    def new_state(self, numel: int) -> SchemeState:
        check_part(self.canonical, numel)
        return PairState(self.pair, numel)


class PairState(SchemeState):
    """Encodes with the push codec, decodes with the pull codec, in slices that stay in cache."""

    def __init__(self, pair: CodecPair, numel: int) -> None:
        self.rounds = (Round(pair, numel),)
        self._push, self._pull, self._numel = pair.push, pair.pull, numel

    def encode(self, index: int, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        return self._push.encode(grad, residual, rescale, stream, out)

    def apply(self, payload: Bytes, sent: Sequence[Bytes], target: Array, residual: F32 | None, rescale: float) -> None:
        push, pull, numel = self._push, self._pull, self._numel
        pull.validate(payload, numel)
        together = push.chunk == pull.chunk
        if residual is not None and not together:
            for lo, hi in slices(push, numel):
                push.commit(sent[0], numel, lo, hi, target[lo:hi], residual[lo:hi], rescale)
        for lo, hi in slices(pull, numel):
            if residual is not None and together:  # reads the gradient that the next line overwrites, while it is in cache
                push.commit(sent[0], numel, lo, hi, target[lo:hi], residual[lo:hi], rescale)
            pull.decode(payload, numel, lo, hi, target[lo:hi])

    def add_back(self, sent: Sequence[Bytes], residual: F32) -> None:
        for lo, hi in slices(self._push, self._numel):
            self._push.fold([sent[0]], self._numel, lo, hi, residual[lo:hi], False)


def check_part(canonical: str, numel: int) -> None:
    """Raise CodecError, naming the codec, unless a part may have ``numel`` elements."""
    if not 1 <= numel <= MAX_PART:
        raise CodecError(f"codec {canonical}: a part has 1 to {MAX_PART} elements, not {numel}")


def slices(codec: Codec, numel: int) -> list[tuple[int, int]]:
    """The slices of a part that ``codec`` works on one at a time."""
    if not codec.chunk or numel <= codec.chunk:
        return [(0, numel)]
    assert codec.chunk % BLOCK == 0
    return [(lo, min(lo + codec.chunk, numel)) for lo in range(0, numel, codec.chunk)]
