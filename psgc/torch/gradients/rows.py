"""Sparse gradients: those of embeddings that have ``sparse=True``, of which only the rows that a step has used travel.

All ranks gather each other's rows and add them up themselves, so that what travels and what is kept follows the rows, and not the table. A rank without
rows takes part all the same: nobody can know beforehand who has some. Owns what is declared of such a gradient, and its bucket's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

import numpy as np
import torch

from psgc.codecs.rows import VALUES, Rows, RowsCodec, read_rows, words_of, write_rows
from psgc.errors import UsageError
from psgc.layout import BucketSpec, Layout, TensorSpec
from psgc.layout.collective import GATHERED
from psgc.layout.records import Bucket
from psgc.torch.plans.choice import Choice
from psgc.torch.session.backup import refuse_backup
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.tensors.buffers import Array
from psgc.wire.frames import MAX_PAYLOAD_BYTES
from psgc.worker.session import Session

Sparse = torch.nn.Module | Iterable[str]  # a model whose sparse embeddings are meant, or names of parameters and patterns of names
HOW_SPARSE: Final = "psgc carries those that DistributedOptimizer(..., sparse=[names]) names, as rows; else use sparse=False in its layer"
_EMBEDDINGS: Final = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def has_sparse(model: torch.nn.Module) -> bool:
    """Whether the model has embeddings whose gradients are sparse, and are trained."""
    return any(table.requires_grad for table in _tables(model))


def _tables(model: torch.nn.Module) -> list[torch.Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, _EMBEDDINGS) and module.sparse]


def rows_among(session: Session, given: Sparse, names: Mapping[torch.Tensor, str], choice: Choice, by: str) -> frozenset[str]:
    """The names of the parameters that ``given`` means. names: of all parameters. by: the call. Raises UsageError for a name that no parameter has, a
    parameter whose gradients cannot be rows, and where the job cannot carry them."""
    found = _named(given, names, by)
    if not found:
        return found
    for parameter, name in names.items():
        if name in found:
            _check(name, parameter)
    config = session.config
    reason = (
        "under PSGC_ASYNC=1 servers hold whole weights" if config.async_mode
        else "auto and PSGC_PROFILE measure dense gradients" if choice.auto or config.profile
        else f"PSGC_WIRE={config.wire} carries dense tensors" if config.wire != "psgc"
        else ""
    )  # fmt: skip
    if reason:
        raise UsageError(f"{by}: the gradient of {min(found)!r} is to be sparse, but {reason}; use sparse=False in its layer")
    refuse_replaceable(session, f"{by} with sparse gradients", "use sparse=False in the layers, or PSGC_ON_WORKER_LOSS=stop")
    refuse_backup(session, f"{by} with sparse gradients", "use sparse=False in the layers")
    return found


def _named(given: Sparse, names: Mapping[torch.Tensor, str], by: str) -> frozenset[str]:
    if isinstance(given, torch.nn.Module):
        tables = {id(table) for table in _tables(given)}
        found = {name for parameter, name in names.items() if id(parameter) in tables}
        if not found:
            raise UsageError(f"{by}: none of the parameters is the table of an embedding with sparse=True in the model given as sparse")
        return frozenset(found)
    found = set()
    for pattern in [given] if isinstance(given, str) else given:
        fitting = [name for name in names.values() if fnmatchcase(name, str(pattern))]
        if not fitting:
            raise UsageError(f"{by}: sparse has {pattern!r}, but no parameter is called so; expected names as in named_parameters")
        found.update(fitting)
    return frozenset(found)


def _check(name: str, parameter: torch.Tensor) -> None:
    if str(parameter.dtype).removeprefix("torch.") not in VALUES or not parameter.dim() or not parameter.numel():
        raise UsageError(
            f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}; sparse gradients have rows of {', '.join(VALUES)}: "
            f"leave it out of sparse="
        )


def check_sparse(name: str, grad: torch.Tensor) -> None:
    """Raise UsageError for a gradient that is not of rows."""
    if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
        kind = f"sparse in {grad.sparse_dim()} dimensions" if grad.layout == torch.sparse_coo else "dense"
        raise UsageError(
            f"gradient of {name!r} is {kind}, but sparse= says that it is of rows; leave it out there, or use sparse=True in its layer"
        )


def rows_spec(spec: TensorSpec) -> TensorSpec:
    """What is declared of a sparse gradient: the array of ``psgc.codecs.rows``, with room for every row, or as many as one payload may have."""
    columns = _columns(spec.shape)
    return TensorSpec(spec.name, (words_of(min(spec.shape[0], _most_rows(columns)), columns),), "float32", spec.group)


def rows_bucket(number: int, spec: TensorSpec) -> BucketSpec:
    """number: of the tensor among those that are declared. spec: of the dense gradient."""
    codec = RowsCodec("float32", spec.shape[0], _columns(spec.shape), spec.dtype)
    return BucketSpec((number,), codec.canonical, -number, parts=1, option=GATHERED)


def _columns(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])


def _most_rows(columns: int) -> int:
    return (MAX_PAYLOAD_BYTES - 8) // (4 + 4 * columns)


class RowsBuffer:
    """A sparse gradient as a bucket's array. ``bind`` says before each step which one takes part, None for none; after the step ``made`` is the mean over all
    ranks, and ``skipped`` says that none had a gradient. Memory is used up to the most rows that have come so far."""

    waits = False

    def __init__(self, layout: Layout, bucket: Bucket) -> None:
        codec = RowsCodec.from_parameters(_parameters_of(bucket.codec), "float32")
        assert isinstance(codec, RowsCodec)
        self._columns, self._ranks, self._name = codec.columns, layout.counted(bucket), layout.tensors[bucket.tensors[0]].name
        self._array = np.zeros(bucket.numel, np.float32)  # pages that are not written to take no memory
        self._like: torch.Tensor | None = None
        self._mean: Rows | None = None
        self.skipped = False

    def lie_in(self, memory: Array) -> None:
        """Do nothing: rows lie in memory of their own."""

    def give_views(self, likes: Sequence[torch.Tensor], memory: Array | None) -> tuple[torch.Tensor | None, ...]:
        """None: a sparse gradient is no view."""
        return (None,) * len(likes)

    def bind(self, tensors: Sequence[torch.Tensor | None], likes: Sequence[torch.Tensor] | None = None) -> None:
        """Take this gradient for the next step. likes: the parameter. Raises UsageError for one of more rows than travel at once."""
        (grad,), (self._like,) = tensors, likes or ()
        rows = Rows(False, np.empty(0, np.uint32), np.empty((0, self._columns), np.float32))
        if grad is not None:
            whole = grad.detach().coalesce()
            numbers, values = whole.indices()[0].cpu().numpy(), whole.values().to("cpu", torch.float32).reshape(-1, self._columns)
            rows = Rows(True, numbers.astype(np.uint32), values.numpy())
        if words_of(*rows.values.shape) > self._array.size:
            raise UsageError(
                f"gradient of {self._name!r} has {rows.numbers.size} rows in one step, at most {_most_rows(self._columns)} travel; use "
                f"sparse=False in its layer"
            )
        write_rows(rows, self._array)
        self._mean, self.skipped = None, False

    def load(self) -> Array:
        return self._array

    def store(self, skipped: bool) -> None:
        total = read_rows(self._array, self._columns)
        self.skipped = skipped or not total.present
        if not self.skipped:
            self._mean = Rows(True, total.numbers.astype(np.int64), total.values / np.float32(self._ranks))

    def arrive(self) -> None:
        """Do nothing: the mean lies on the host until it is asked for."""

    @property
    def made(self) -> tuple[torch.Tensor | None, ...]:
        """The mean, coalesced; None where no rank had a gradient."""
        like, mean = self._like, self._mean
        if like is None or mean is None:
            return (None,)
        values = torch.from_numpy(mean.values).to(like.dtype).reshape(-1, *like.shape[1:])
        made = torch.sparse_coo_tensor(
            torch.from_numpy(mean.numbers)[None],
            values,
            like.shape,
            dtype=like.dtype,
            device=like.device,
            is_coalesced=True,
            check_invariants=False,
        )
        return (made,)


def _parameters_of(codec: str) -> dict[str, str]:
    return dict(each.split("=") for each in codec.partition(":")[2].split(","))


def is_rows(bucket: Bucket) -> bool:
    return bucket.codec.startswith(f"{RowsCodec.name}:")
