"""A profile of a training job: its tensors, when each gradient is ready, and how long codecs take on its hardware.

    {"version": 1, "model", "hardware", "device": "cpu", "date", "source", "unit": "us",     device: where gradients lie, cpu or cuda
     "tensors": [{"name", "numel", "ready_us", "shape", "itemsize"}],    in the order in which gradients become ready; shape may be left out, and so may
                                                                         itemsize, a gradient's bytes per element, where it is 4
     "forward_us": null,                                     the rest of an iteration: before the first gradient and after synchronization
     "codecs": {"int8": {"cpu": {"numel": [..], "encode_us": [..], "decode_us": [..]}, "gpu": {...}, "server": {...}}},
     "spread": {"backward_us": {"median", "iqr"}},           of measured totals: median and interquartile range
     "compute_threads": 1,                                   threads that a worker computes with, where gradients lie in hosts' memory
     "carriers": {"tcp": {"lone_us", "each_us", "gbps"}},    what carriers cost beside their links: see carriers.py there
     "overheads": {"part_us", "next_part_us", ...},          the same in profiles of former versions
     "links": {"loopback": {"gbps", "latency_us"}},
     "correction": {"factors", "error", ...}}                what psgc verify measured: see correction.py there

or a CSV table of tensors only, with the columns name, numel and ready_us. Owns both formats and their errors, and cost curves. Times are in
microseconds, counted from the readiness of the first gradient. ``server`` is one of a codec's devices: decode_us is a server's time to add one
payload, encode_us its time to finish the sum, so W payloads take W times decode_us plus one encode_us; where it has "passes_us" ({"1": [..], "2": [..]}, times
by size of whole passes over so many payloads), those count. ``none`` has times, too: copies into slots and out of them, and the sum. All fields after
"forward_us", and "device", may be left out.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psgc.errors import UsageError
from psgc.plan.inputs.architectures import architecture, architecture_names
from psgc.plan.inputs.carriers import CarrierCosts, carriers_of_overheads, read_carriers
from psgc.plan.inputs.cluster import MOST_THREADS, Link, read_link
from psgc.plan.inputs.correction import Correction, corrected_carrier, read_correction
from psgc.plan.inputs.documents import is_number, read_document, shown

F64 = NDArray[np.float64]
VERSION: Final = 1
FLOAT_BYTES: Final = 4  # of a float32
ITEMSIZES: Final = (1, 2, 4, 8, 16)
MOST_NUMEL: Final = 1 << 34  # of a tensor: 64 GiB of fp32, or 16384 parts for methods that cut at 4 MiB
MOST_PAYLOADS: Final = 1 << 20  # of a server's pass; a larger number is a typing error
LEAST_TFLOPS, MOST_TFLOPS = 1e-6, 1e6  # every GPU lies between these
# Our estimates of TFLOP/s in training: two thirds of the fp32 peak of V100 and T4, 40 % of the others' bf16 peak. Users who know better give a number.
ACHIEVED_TFLOPS: Final = {"v100": 11.0, "t4": 6.0, "a10g": 30.0, "a100": 140.0, "h100": 400.0, "h200": 400.0}


@dataclass(frozen=True, slots=True)
class TensorProfile:
    """One gradient. ready_us: when backward has computed it; shape: where it is known; itemsize: bytes per element, as it is sent uncompressed."""

    name: str
    numel: int
    ready_us: float
    shape: tuple[int, ...] | None = None
    itemsize: int = FLOAT_BYTES

    def to_json(self) -> dict[str, Any]:
        more = {} if self.shape is None else {"shape": list(self.shape)}
        size = {} if self.itemsize == FLOAT_BYTES else {"itemsize": self.itemsize}
        return {"name": self.name, "numel": self.numel, "ready_us": self.ready_us, **more, **size}


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Microseconds of encoding and of decoding by size: linear between the measured sizes and beyond the last, constant below the first;
    with a single measured size, proportional above it."""

    numel: tuple[float, ...]
    encode_us: tuple[float, ...]
    decode_us: tuple[float, ...]
    passes: tuple[
        tuple[int, tuple[float, ...]], ...
    ] = ()  # on a server: numbers of payloads, ascending, and the microseconds of a whole pass over them

    def scaled(self, factor: float) -> CostCurve:
        """The curve with all times multiplied by ``factor``."""
        if factor == 1:
            return self
        encode, decode, *passes = (
            tuple(us * factor for us in times) for times in (self.encode_us, self.decode_us, *(us for _, us in self.passes))
        )
        return CostCurve(self.numel, encode, decode, tuple((count, us) for (count, _), us in zip(self.passes, passes, strict=True)))

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"numel": list(self.numel), "encode_us": list(self.encode_us), "decode_us": list(self.decode_us)}
        return found | ({"passes_us": {str(count): list(us) for count, us in self.passes}} if self.passes else {})

    def encode(self, numel: float) -> float:
        return float(self.encode_all(np.array([numel]))[0])

    def decode(self, numel: float) -> float:
        return float(self.decode_all(np.array([numel]))[0])

    def sum_us(self, payloads: float) -> tuple[float, ...]:
        """Microseconds of a server's pass over so many payloads and its sum, by size: between the measured numbers of payloads linear, beyond the last in
        passes of so many; without such measurements each payload takes decode_us, and the sum encode_us."""
        if not self.passes:
            return tuple(payloads * add + finish for add, finish in zip(self.decode_us, self.encode_us, strict=True))
        counts = [float(count) for count, _ in self.passes]
        found = []
        for place, finish in enumerate(self.encode_us):
            measured = [us[place] for _, us in self.passes]
            more = max(0.0, measured[-1] - finish) / counts[-1] * max(0.0, payloads - counts[-1])
            found.append(float(np.interp(payloads, counts, measured)) + more)
        return tuple(found)

    def encode_all(self, numel: F64) -> F64:
        return on_curve(self.numel, self.encode_us, numel)

    def decode_all(self, numel: F64) -> F64:
        return on_curve(self.numel, self.decode_us, numel)


def on_curve(sizes: Sequence[float], times: Sequence[float], numel: F64) -> F64:
    """The values of a curve through these points; see ``CostCurve``."""
    if len(sizes) == 1:
        return times[0] * np.maximum(1.0, numel / sizes[0])
    slope = max((times[-1] - times[-2]) / (sizes[-1] - sizes[-2]), 0.0)
    return np.interp(numel, sizes, times) + slope * np.maximum(numel - sizes[-1], 0.0)


def least_slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Lower bound on a curve's value per element, at any size. Between two sizes, the minimum is at one of them."""
    last = times[0] / sizes[0] if len(sizes) == 1 else (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    return min([max(last, 0.0), *(us / size for size, us in zip(sizes, times, strict=True) if size)])


Curves = Mapping[str, Mapping[str, CostCurve]]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and interquartile range of a measured total, in microseconds."""

    median: float
    iqr: float


@dataclass(frozen=True)
class Profile:
    """A profile; see the module's text. tensors: in the order of readiness; codecs: by name, then by device; spread, overheads, links: by name."""

    model: str
    tensors: tuple[TensorProfile, ...]
    hardware: str = ""
    date: str = ""
    source: str = ""
    forward_us: float | None = None
    codecs: Curves = field(default_factory=dict)
    spread: Mapping[str, Spread] = field(default_factory=dict)
    overheads: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    device: str = ""  # where gradients lie: cpu, cuda, or "" if not known
    carriers: Mapping[str, CarrierCosts] = field(default_factory=dict)
    compute_threads: int = 0  # that a worker computes with, where gradients lie in hosts' memory; 0 if not known
    correction: Correction | None = None

    @cached_property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    @cached_property
    def numel_of(self) -> Mapping[str, int]:
        """The elements of each tensor, by its name."""
        return {tensor.name: tensor.numel for tensor in self.tensors}

    @cached_property
    def itemsize_of(self) -> Mapping[str, int]:
        """The bytes per element of each tensor, by its name."""
        return {tensor.name: tensor.itemsize for tensor in self.tensors}

    @cached_property
    def itemsizes(self) -> tuple[int, ...]:
        """All of them, that of most elements first."""
        elements: dict[int, int] = {}
        for tensor in self.tensors:
            elements[tensor.itemsize] = elements.get(tensor.itemsize, 0) + tensor.numel
        return tuple(sorted(elements, key=lambda size: -elements[size])) or (FLOAT_BYTES,)

    def narrowed(self, most: int) -> Profile:
        """The profile with gradients of at most so many bytes per element."""
        if max(self.itemsizes) <= most:
            return self
        return replace(self, tensors=tuple(replace(one, itemsize=min(most, one.itemsize)) for one in self.tensors))

    @property
    def bytes_per_element(self) -> float:
        """Of uncompressed gradients, on average."""
        return sum(tensor.numel * tensor.itemsize for tensor in self.tensors) / self.numel

    @cached_property
    def ready_us_of(self) -> Mapping[str, float]:
        """When each tensor is ready, by its name."""
        return {tensor.name: tensor.ready_us for tensor in self.tensors}

    @cached_property
    def columns(self) -> tuple[F64, F64]:
        """The elements of each tensor, and when it is ready."""
        return np.array([tensor.numel for tensor in self.tensors], np.float64), np.array(
            [tensor.ready_us for tensor in self.tensors], np.float64
        )

    @cached_property
    def _last_slower(self) -> dict[float, Profile]:
        return {}

    def slower(self, factor: float) -> Profile:
        """The profile with a backward that takes ``factor`` times as long. The last one is kept: plans are compared in the same few variations."""
        if factor not in self._last_slower:
            tensors = tuple(TensorProfile(one.name, one.numel, one.ready_us * factor, one.shape, one.itemsize) for one in self.tensors)
            self._last_slower.clear()
            self._last_slower[factor] = replace(self, tensors=tensors)
        return self._last_slower[factor]

    @property
    def backward_us(self) -> float:
        """Microseconds from the first gradient's readiness to the last's."""
        return self.tensors[-1].ready_us

    @cached_property
    def all_carriers(self) -> Mapping[str, CarrierCosts]:
        """What is known of carriers, in whatever form."""
        return {**carriers_of_overheads(self.overheads), **self.carriers}

    @cached_property
    def corrected(self) -> Profile:
        """The profile with its correction applied to all that it has times of; what the correction says of links is the cluster's, which it keeps for that."""
        if self.correction is None:
            return self
        factors = self.correction.factors
        codecs = {
            name: {
                device: curve.scaled(factors.server if device == "server" else factors.codecs if device == "cpu" else 1.0)
                for device, curve in of.items()
            }
            for name, of in self.codecs.items()
        }
        carriers = {name: corrected_carrier(costs, factors) for name, costs in self.all_carriers.items()}
        forward_us = None if self.forward_us is None else self.forward_us * factors.compute
        left = replace(self.correction, factors=replace(factors, compute=1.0, codecs=1.0, server=1.0, messages=1.0))
        return replace(self.slower(factors.compute), forward_us=forward_us, codecs=codecs, carriers=carriers, overheads={}, correction=left)

    def curve(self, codec: str, device: str) -> CostCurve | None:
        return self.codecs.get(codec, {}).get(device)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION, "model": self.model, "hardware": self.hardware, "device": self.device, "date": self.date, "source": self.source, "unit": "us",
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "forward_us": self.forward_us,
            "codecs": {
                name: {device: curve.to_json() for device, curve in devices.items()}
                for name, devices in self.codecs.items()
            },
            "spread": {total: {"median": s.median, "iqr": s.iqr} for total, s in self.spread.items()},
            "compute_threads": self.compute_threads,
            "carriers": {name: costs.to_json() for name, costs in self.carriers.items()},
            "overheads": dict(self.overheads),
            "links": {name: {"gbps": link.gbps, "latency_us": link.latency_us} for name, link in self.links.items()},
            **({"correction": self.correction.to_json()} if self.correction else {}),
        }  # fmt: skip


def _curve(by_size: Iterable[tuple[float, float, float]]) -> CostCurve:
    sizes, encode, decode = zip(*by_size, strict=True)
    return CostCurve(tuple(sizes), tuple(encode), tuple(decode))


def _level_then_linear(encode_us: float, decode_us: float, numel: float = 2.0**20) -> CostCurve:
    """A curve through one measurement: constant below ``numel``, proportional above it."""
    return _curve([(numel, encode_us, decode_us), (2 * numel, 2 * encode_us, 2 * decode_us)])


def _at_gbps(encode: float, decode: float, launch_us: float) -> CostCurve:
    """A curve of a fixed launch time plus a rate, in 1e9 bits of float32 per second."""
    sizes = (1.0, 2.0**26)
    return _curve([(n, launch_us + 32e-3 * n / encode, launch_us + 32e-3 * n / decode) for n in sizes])


# Codec times on a V100 and its host, from the public artefact of Wang et al. 2023: GPU times at 2**20 elements, CPU rates (dual Xeon 8260) in
# Gbit/s of float32 at 2**25. They are that artefact's constants, not measurements of psgc.
V100_CODECS: Final[Curves] = {
    "randomk": {"gpu": _level_then_linear(54, 34), "cpu": _at_gbps(30, 58, 10)},
    "topk": {"gpu": _level_then_linear(356, 34), "cpu": _at_gbps(16.5, 58, 10)},
    "dgc": {"gpu": _level_then_linear(356, 34), "cpu": _at_gbps(16.5, 58, 10)},
    "efsignsgd": {"gpu": _level_then_linear(130, 140), "cpu": _at_gbps(31, 88, 10)},
    "onebit": {"gpu": _level_then_linear(450, 170), "cpu": _at_gbps(30, 94, 10)},
}
# Payload bytes per element of codecs that exist only as these times. dgc sends 1 % of the values, with 4 bytes of index each; efsignsgd sends one bit per
# element.
PUBLISHED_BYTES: Final[Mapping[str, float]] = {"dgc": 0.08, "efsignsgd": 0.125}
BUILTIN_CODECS: Final[dict[str, Curves]] = {"v100": V100_CODECS}


def computed_profile(name: str, gpu: str, batch: int | None = None) -> Profile:
    """The profile of a well-known model, computed from its FLOPs and the GPU's achieved TFLOP/s. Raises UsageError for an unknown name."""
    model = architecture(name)
    tflops = _tflops(gpu)
    items, ready, tensors = batch or model.batch, 0.0, []
    for weight in reversed(model.weights):
        ready += 2 * weight.flops * items / (tflops * 1e6)
        tensors.append(TensorProfile(weight.name, weight.numel, ready, weight.shape))
    first = tensors[0].ready_us
    moved = tuple(replace(t, ready_us=t.ready_us - first) for t in tensors)
    forward = sum(weight.flops for weight in model.weights) * items / (tflops * 1e6)
    source = f"computed: {items} {model.item}s a GPU at {tflops:g} TFLOP/s achieved"
    return Profile(model.name, moved, gpu, "", source, forward, BUILTIN_CODECS.get(gpu.lower(), {}), device="cuda")


def _tflops(gpu: str) -> float:
    known = ACHIEVED_TFLOPS.get(gpu.lower())
    if known is not None:
        return known
    try:
        value = float(gpu)
    except ValueError:
        value = 0.0
    if not LEAST_TFLOPS <= value <= MOST_TFLOPS:  # no NaN passes
        raise UsageError(f"unknown GPU {gpu!r}; choose one of {', '.join(ACHIEVED_TFLOPS)}, or give what it achieves in TFLOP/s")
    return value


def load_profile(text: str, gpu: str = "v100") -> Profile:
    """A profile from its JSON, from a CSV table of tensors, or of a well-known model by name. Raises UsageError naming file and field."""
    path = Path(text)
    if not path.is_file():
        if text.lower().replace("_", "-") in architecture_names():
            return computed_profile(text, gpu)
        raise UsageError(f"profile {text!r} is neither a file nor one of {', '.join(architecture_names())}")
    if path.suffix != ".csv":
        return read_profile(read_document(path, str(path)), str(path))
    try:
        with path.open(newline="") as file:
            return read_table(_rows(csv.DictReader(file), str(path)), path.stem, str(path))
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path}: not valid CSV: {error}") from None


def _rows(table: csv.DictReader[str], source: str) -> csv.DictReader[str]:
    """The table, if it has the columns. Raises UsageError naming those that it has."""
    found = table.fieldnames or ()
    for column in ("name", "numel", "ready_us"):
        if column not in found:
            raise UsageError(
                f"{source}: no column {column}; expected name, numel and ready_us in the first line, got {shown(','.join(found))}"
            )
    return table


def read_table(rows: Iterable[Mapping[str, Any]], model: str, source: str) -> Profile:
    """A profile from rows with name, numel and ready_us, as text. Raises UsageError naming the row and the column."""
    tensors = []
    for number, row in enumerate(rows, 2):  # the first line is the header
        values: dict[str, Any] = {"name": row.get("name")}
        for column in ("numel", "ready_us"):
            try:
                values[column] = float(row[column])
            except (KeyError, TypeError, ValueError):
                raise UsageError(f"{source}: line {number}: column {column} is {row.get(column)!r}, expected a number") from None
        tensors.append(_tensor(values, f"{source}: line {number}"))
    return _checked(Profile(model, tuple(tensors), source=source), source)


def read_profile(document: Any, source: str) -> Profile:
    """A profile from its JSON document. Raises UsageError naming the field."""
    if not isinstance(document, Mapping) or not isinstance(document.get("tensors"), list):
        raise UsageError(f'{source}: expected an object with a list "tensors"')
    if document.get("version") != VERSION:
        raise UsageError(f"{source}: field version is {document.get('version')!r}, expected {VERSION}; make the profile anew")
    if document.get("unit", "us") != "us":
        raise UsageError(f"{source}: field unit is {document['unit']!r}; times are in us")
    tensors = tuple(_tensor(entry, f"{source}: tensors[{number}]") for number, entry in enumerate(document["tensors"]))
    codecs = {
        name: {
            str(device): _read_curve(curve, f"{source}: codecs.{name}.{device}")
            for device, curve in _object(devices, f"{source}: codecs.{name}")
        }
        for name, devices in _object(document.get("codecs", {}), f"{source}: codecs")
    }
    spread = {
        total: Spread(*(_number(entry.get(key), f"{source}: spread.{total}.{key}") for key in ("median", "iqr")))
        for total, entry in _objects(document, "spread", source)
    }
    overheads = {
        name: _number(value, f"{source}: overheads.{name}")
        for name, value in _object(document.get("overheads", {}), f"{source}: overheads")
    }
    links = {name: read_link(entry, f"links.{name}", source) for name, entry in _objects(document, "links", source)}
    forward = document.get("forward_us")
    texts = {key: str(document.get(key, "")) for key in ("hardware", "device", "date", "source")}
    return _checked(Profile(
        str(document.get("model", "")), tensors, **texts, codecs=codecs, spread=spread, overheads=overheads, links=links,
        carriers=read_carriers(document.get("carriers", {}), source), compute_threads=_threads(document, source),
        correction=read_correction(document.get("correction"), source),
        forward_us=None if forward is None else _number(forward, f"{source}: forward_us"),
    ), source)  # fmt: skip


def _threads(document: Mapping[str, Any], source: str) -> int:
    value = document.get("compute_threads", 0)
    if type(value) is not int or not 0 <= value <= MOST_THREADS:
        raise UsageError(
            f"{source}: field compute_threads is {shown(value)}, expected a whole number of at least 0, and {MOST_THREADS:,} at most"
        )
    return value


def _object(value: Any, place: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{place}: expected an object, got {value!r}")
    return list(value.items())


def _objects(document: Mapping[str, Any], key: str, source: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The objects in an optional field that is an object of objects."""
    found = _object(document.get(key, {}), f"{source}: {key}")
    for name, entry in found:
        _object(entry, f"{source}: {key}.{name}")
    return found


def _number(value: Any, place: str) -> float:
    if not is_number(value):
        raise UsageError(f"{place} is {shown(value)}, expected a number of at least 0")
    return float(value)


def _tensor(entry: Any, place: str) -> TensorProfile:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise UsageError(f"{place}: expected a tensor with name, numel and ready_us")
    numel, ready = entry.get("numel"), entry.get("ready_us")
    if isinstance(numel, bool) or not isinstance(numel, int | float) or numel != numel // 1 or not 1 <= numel <= MOST_NUMEL:
        raise UsageError(
            f"{place}: numel of {shown(entry['name'])} is {shown(numel)}, expected a whole number of at least 1, and 2**34 at most"
        )
    if not is_number(ready):
        _number(ready, f"{place}: ready_us of {shown(entry['name'])}")
    itemsize = entry.get("itemsize", FLOAT_BYTES)
    if type(itemsize) is not int or itemsize not in ITEMSIZES:
        raise UsageError(
            f"{place}: itemsize of {shown(entry['name'])} is {shown(itemsize)}, expected one of {', '.join(map(str, ITEMSIZES))}"
        )
    return TensorProfile(entry["name"], int(numel), float(ready), _shape(entry, int(numel), place), itemsize)  # type: ignore[arg-type]


def _shape(entry: Mapping[str, Any], numel: int, place: str) -> tuple[int, ...] | None:
    shape = entry.get("shape")
    if shape is None:
        return None
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape) or math.prod(shape) != numel:
        raise UsageError(f"{place}: shape of {shown(entry['name'])} is {shown(shape)}, expected sizes whose product is its numel, {numel}")
    return tuple(shape)


def _read_curve(entry: Any, place: str) -> CostCurve:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{place}: expected an object with numel, encode_us and decode_us")
    sizes, encode, decode = (_numbers(entry.get(key), key, place) for key in ("numel", "encode_us", "decode_us"))
    if not len(sizes) == len(encode) == len(decode) or list(sizes) != sorted(set(sizes)) or sizes[0] <= 0:
        raise UsageError(f"{place}: numel, encode_us and decode_us must be as long as one another, and sizes ascend")
    return CostCurve(sizes, encode, decode, _passes(entry.get("passes_us", {}), len(sizes), place))


def _numbers(values: Any, key: str, place: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not values or not all(map(is_number, values)):
        raise UsageError(f"{place}: field {key} is {shown(values)}, expected a list of numbers of at least 0")
    return tuple(map(float, values))


def _passes(table: Any, sizes: int, place: str) -> tuple[tuple[int, tuple[float, ...]], ...]:
    found = []
    for count, values in _object(table, f"{place}: passes_us"):
        us = _numbers(values, f"passes_us.{count}", place)
        if not count.isdecimal() or not 0 < int(count) <= MOST_PAYLOADS or len(us) != sizes:
            raise UsageError(f"{place}: passes_us: {shown(count)}: expected a number of payloads, with as many times as there are sizes")
        found.append((int(count), us))
    return tuple(sorted(found))


def _checked(profile: Profile, source: str) -> Profile:
    if not profile.tensors:
        raise UsageError(f"{source}: no tensors")
    seen: set[str] = set()
    for before, tensor in zip((None, *profile.tensors), profile.tensors, strict=False):
        if before is not None and tensor.ready_us < before.ready_us:
            raise UsageError(
                f"{source}: {tensor.name!r} is ready before {before.name!r}, which stands before it; order tensors by ready_us"
            )
        if tensor.name in seen:
            raise UsageError(f"{source}: two tensors are named {tensor.name!r}")
        seen.add(tensor.name)
    return profile
