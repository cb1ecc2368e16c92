"""The interface of a codec; ``registry`` finds a codec by its text form.

A codec turns one part (a flat slice of a bucket) into payload bytes and back. It does not know keys, ranks, sockets or
threads; the caller owns the buffers and keeps them alive. Kernels release the GIL.

Ranges: a part may be worked on in slices ``[lo, hi)`` of elements, so that scratch stays in cache. ``lo`` is a multiple of
``Codec.chunk``, ``hi`` too unless it is the end. A codec whose payload has no random access sets ``chunk = 0`` and is then always
called with the whole part.

Buffers: ``payload`` and ``out`` are flat uint8 arrays of any alignment; ``grad``, ``residual`` and ``acc`` are contiguous,
aligned, and of ``array_dtype`` / float32 / ``acc_dtype``. Payload bytes are checked once, by ``validate``, when they arrive;
kernels then trust them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psgc.codecs.common.sources import digest_suffix
from psgc.codecs.common.texts import join_text
from psgc.errors import CodecError

BLOCK: Final = 4096  # parts are cut, and scales end, at multiples of this many elements
MAX_PART: Final = (1 << 31) - 1  # elements of a part: places and counts in it are 32-bit integers
FLOATS: Final = ("float32", "bfloat16", "float16")
PLUGIN_ID: Final = 0x8000  # codecs of other packages have ids from here on
DTYPES: Final[dict[str, Any]] = {  # part dtype -> NumPy dtype of its bytes (NumPy has no bfloat16: its bits as uint16)
    "float32": np.float32, "bfloat16": np.uint16, "float16": np.float16, "float64": np.float64,
    "uint8": np.uint8, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "bool": np.bool_,
}  # fmt: skip

Bytes = NDArray[np.uint8]
Array = NDArray[Any]
F32 = NDArray[np.float32]


class Encoded(NamedTuple):
    """What an encoder wrote: its length, and whether any input (or the sum) was NaN or infinite."""

    payload_bytes: int
    nonfinite: bool


@dataclass(frozen=True, slots=True)
class Stream:
    """Names one counter-based random stream; element i of the *bucket* draws the i-th number whatever the cuts or threads.

    first: index in the bucket of the part's element 0. layout: a 32-bit number of the layout that the bucket is in.
    """

    seed: int
    step: int
    rank: int
    bucket: int
    first: int = 0
    layout: int = 0

    def at(self, step: int, rank: int | None = None, first: int | None = None) -> Stream:
        """Of another step, and of another rank, or from another element on. Each payload has one: a tenth of the time of ``dataclasses.replace``."""
        return Stream(
            self.seed, step, self.rank if rank is None else rank, self.bucket, self.first if first is None else first, self.layout
        )


class Codec(ABC):
    """An encoding with its parameters, for parts of one dtype. Instances are immutable and may be shared between threads."""

    name: ClassVar[str]
    codec_id: int  # means *these bytes*: change the layout and it is a new id; the instance's own where a parameter changes it
    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    chunk: ClassVar[int] = 65536  # elements that callers pass at once (256 KB of fp32 stays in L2); 0 = whole part only
    defaults: ClassVar[Mapping[str, str]] = {}  # every parameter it takes, with its default
    unbiased: bool = False  # an instance may differ from its class: parameters decide it
    of_sums: bool = False  # encodes only sums of payloads of the same part, at the same random places (``answering``)
    additive: ClassVar[bool] = False  # payloads can be summed without decoding
    fixed_size: ClassVar[bool] = False  # every payload is as long as ``payload_bound`` says
    sparse: ClassVar[bool] = False  # sends some elements and leaves out the others
    flags_nonfinite: ClassVar[bool] = True  # False: NaN and infinity travel element by element (none, casts)
    advice: ClassVar[str] = ""  # when to use it, in one line; every codec of psgc has one

    def __init__(self, dtype: str = "float32") -> None:
        if dtype not in self.dtypes:
            raise CodecError(f"codec {self.name} carries {', '.join(self.dtypes)}, not {dtype}; use 'none' for this tensor")
        self.dtype = dtype

    @classmethod
    @abstractmethod
    def from_parameters(cls, parameters: Mapping[str, str], dtype: str) -> Codec:
        """Build from the text form's parameters. Raises CodecError naming codec and parameter."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, str]:
        """Parameters in canonical text, those at their default left out."""

    @property
    def canonical(self) -> str:
        """The text form that is printed, compared and sent: ``name`` or ``name:k=v,...``; of another package's codec ``name@digest``."""
        return join_text(self.name + digest_suffix(type(self), Codec), self.parameters)

    @property
    def feedback(self) -> bool:
        """Whether the codec keeps what a payload leaves out in a residual and sends it later."""
        return False

    @property
    def cut_anywhere(self) -> bool:
        """Whether a tensor's elements come back the same, bit for bit, into whichever parts it is cut at multiples of BLOCK."""
        return bool(self.chunk)

    def contraction(self, numel: int) -> float | None:
        """A delta in (0, 1] with E|p - decode(encode(p))|^2 <= (1 - delta) |p|^2 for every part p of ``numel`` elements, except for float32's
        rounding and underflow. It keeps residuals bounded. None without feedback, or if no such bound is known.

        Source: Stich et al. 2018, definition 2.1; Karimireddy et al. 2019, assumption A."""
        return None

    @property
    def array_dtype(self) -> Any:
        """NumPy dtype of the arrays given to ``encode`` and filled by ``decode``: float32 for every lossy codec."""
        return np.float32

    @property
    def acc_dtype(self) -> Any:
        """NumPy dtype of the server's accumulator."""
        return np.float32

    @abstractmethod
    def payload_bound(self, numel: int) -> int:
        """Most bytes a payload of ``numel`` elements takes; exact for codecs of fixed size."""

    @abstractmethod
    def validate(self, payload: Bytes, numel: int) -> None:
        """Raise PayloadError unless every kernel below can read ``payload`` in bounds."""

    @abstractmethod
    def encode(self, grad: Array, residual: F32 | None, rescale: float, stream: Stream, out: Bytes) -> Encoded:
        """Write the payload of ``grad + rescale * residual`` to ``out``; inputs are not modified. One pass where possible."""

    @abstractmethod
    def decode(self, payload: Bytes, numel: int, lo: int, hi: int, out: Array) -> None:
        """Write elements ``[lo, hi)`` of the part to ``out`` (length ``hi - lo``)."""

    @abstractmethod
    def fold(self, payloads: Sequence[Bytes], numel: int, lo: int, hi: int, acc: Array, fresh: bool) -> None:
        """Set ``acc`` (length ``hi - lo``) to the left-to-right sum of the payloads' slices if ``fresh``; else add that sum to ``acc``. At most 8
        payloads."""

    @abstractmethod
    def finish(
        self, acc: Array, numel: int, lo: int, hi: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded:  # fmt: skip
        """Encode ``p = acc / divisor + rescale * residual`` for the slice into its place in ``out`` (the whole part's payload) and
        write ``p - decode(payload)`` to ``residual_out``. May overwrite ``acc``. ``residual`` and ``residual_out`` are slices
        like ``acc``, both None for a codec without feedback, and never the same memory. ``payload_bytes`` is the whole part's."""

    def fold_and_finish(
        self, push: Codec, payloads: Sequence[Bytes], numel: int, divisor: int, residual: F32 | None, residual_out: F32 | None,
        rescale: float, stream: Stream, out: Bytes,
    ) -> Encoded | None:  # fmt: skip
        """Do what ``push.fold`` and this codec's ``finish`` do, in fewer passes, for a whole part that is the sum of only these payloads. Returns
        None, and does nothing, if this codec has no such kernel."""
        return None

    @abstractmethod
    def reference_payload(self, p: Array, stream: Stream) -> bytes:
        """The payload of p in plain NumPy, which tests hold the kernels against: obvious rather than fast."""

    @abstractmethod
    def reference_elements(self, payload: bytes, numel: int) -> Array:
        """The elements of a payload in plain NumPy, in the accumulator's dtype."""

    def commit(self, payload: Bytes, numel: int, lo: int, hi: int, grad: F32, residual: F32, rescale: float) -> None:
        """``residual <- grad + rescale * residual - decode(payload)`` for a slice. Codecs without feedback never see it."""
        raise NotImplementedError(f"{self.name} keeps no residual")

    def check_bucket(self, numel: int) -> None:  # noqa: B027 - most codecs carry buckets of any size
        """Raise CodecError, naming the parameter, if buckets of ``numel`` elements are too small for it."""

    def answering(self, push: Codec) -> Codec:
        """This codec in the form in which servers answer payloads of ``push``; it may depend on what sums of such payloads look like (``of_sums``). Raises
        CodecError for a pair that cannot work."""
        return self

    def warm(self) -> None:  # noqa: B027 - codecs whose kernels are compiled on import have nothing to do
        """Compile or load every kernel this codec runs, so that the first step does not wait for it."""


class Adder(ABC):
    """A codec whose payloads servers can add without decoding, if they answer with the same codec: the sum of payloads is a payload."""

    @abstractmethod
    def add(self, payloads: Sequence[Bytes], numel: int, total: Bytes, fresh: bool) -> None:
        """Set ``total``, a payload, to the left-to-right sum of the payloads if ``fresh``; else add that sum to ``total``. At most 8 payloads. Raises
        PayloadError for payloads that do not belong together."""

    @abstractmethod
    def divide(self, total: Bytes, numel: int, divisor: int) -> Encoded:
        """Set ``total`` to the answer: the payload of its elements divided by ``divisor``."""


@dataclass(frozen=True, slots=True)
class CodecPair:
    """The codec that workers push with and the one that servers answer with."""

    push: Codec
    pull: Codec

    @property
    def adder(self) -> Adder | None:
        """The codec, if servers add its payloads without decoding; else None."""
        return self.push if isinstance(self.push, Adder) and self.push.canonical == self.pull.canonical else None

    @property
    def canonical(self) -> str:
        return self.push.canonical if self.push.canonical == self.pull.canonical else f"{self.push.canonical}/{self.pull.canonical}"
