"""Tensors' numbers and layouts as BytePS has them: numbers in the order of declaration, one bucket a tensor, parts of one size. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from psgc.errors import UsageError
from psgc.layout import Bucket, Declaration, Layout, Part, TensorSpec
from psgc.layout.byteps_hash import HashPlacement
from psgc.layout.machines import Machines
from psgc.pslite.byteps.commands import ITEM_BYTES, PartPlace, parts_of

# Dtypes that BytePS does not carry travel as one that holds all of their values.
CARRIED_AS = {name: name for name in ITEM_BYTES} | {"bfloat16": "float32", "int16": "int32", "bool": "uint8"}


def byteps_name(declaration: Declaration, tensor: TensorSpec) -> str:
    """What BytePS calls the tensor, without its own prefix."""
    if declaration.kind == "plan":
        return f"Gradient.{tensor.name}"
    prefix = declaration.name.removeprefix("broadcast.").rstrip("0123456789")
    return f"{prefix}{tensor.name}" if declaration.kind == "broadcast" and declaration.name.startswith("broadcast.") else tensor.name


class Numbering:
    """The numbers of one job's tensors. bound: bytes of each part but the last."""

    def __init__(self, placement: HashPlacement, machines: Machines, bound: int) -> None:
        self._placement, self._machines, self._bound = placement, machines, bound
        self._numbers: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def expect(self, names: Iterable[str]) -> None:
        """Give these names the next numbers, in turn, where they have none."""
        for name in names:
            self._numbers.setdefault(name, len(self._numbers))

    def number(self, name: str, size: int) -> int:
        """A name whose size changes gets another number."""
        if self._sizes.setdefault(name, size) != size:
            return self.number(f"{name} of {size} bytes", size)
        self.expect([name])
        return self._numbers[name]

    def layout(self, declaration: Declaration, layout_id: int, workers: int) -> tuple[Layout, list[list[PartPlace]]]:
        """The layout, and where the parts of each of its buckets lie. Raises UsageError for what BytePS has no keys for."""
        if declaration.buckets:
            raise UsageError(f"{declaration.name}: over ps-lite (PSGC_WIRE=pslite) tensors travel as BytePS cuts them, not by a plan")
        names = {i: byteps_name(declaration, tensor) for i, tensor in enumerate(declaration.tensors)}
        sizes = {i: tensor.numel * ITEM_BYTES[CARRIED_AS[tensor.dtype]] for i, tensor in enumerate(declaration.tensors) if tensor.numel}
        order = sorted(sizes, key=lambda i: names[i]) if declaration.kind == "plan" else list(sizes)
        numbers = {i: self.number(names[i], sizes[i]) for i in order}
        buckets, places = [], []
        for index, i in enumerate(sizes):
            tensor = declaration.tensors[i]
            item = ITEM_BYTES[CARRIED_AS[tensor.dtype]]
            found = parts_of(numbers[i], sizes[i], self._bound, self._placement, self._machines)
            parts = tuple(Part(p.wire_key, p.server, p.start // item, (p.stop - p.start) // item, n) for n, p in enumerate(found))
            small = tensor.dtype != "float32" or sizes[i] < declaration.min_compress_bytes or declaration.kind == "broadcast"
            buckets.append(Bucket(index, (i,), tensor.numel, tensor.dtype, "none" if small else declaration.codec, -index, parts))
            places.append(found)
        layout = Layout(
            id=layout_id, name=declaration.name, kind=declaration.kind, mean=declaration.mean, root=declaration.root, workers=workers,
            tensors=declaration.tensors, buckets=tuple(buckets),
        )  # fmt: skip
        return layout, places
