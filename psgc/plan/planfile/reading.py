"""Reading plans: the JSON of versions 1 and 2, as a ``Plan``.

Version 1 has only the cluster's name, and neither servers of parts nor an issue order; plans from it lack these. Owns the errors of malformed
documents, which are one line and name the field. docs/plans.md has the table of fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeGuard

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, read_cluster
from psgc.plan.inputs.documents import shown
from psgc.plan.model.plan import FIELDS, FIGURES, NOT_KNOWN, VERSION, Issue, JobShape, Plan, PlannedBucket, check_option, pushes, shape_of
from psgc.plan.planfile.order import check_order
from psgc.plan.planfile.strict import read_strictly

VERSIONS: Final = (1, VERSION)
MAX_PARTS: Final = 1 << 16  # of a bucket; parts of 64 KiB of fp32 then make 4 GiB
MAX_ALL_PARTS: Final = 1 << 20  # of a plan: beyond, a step takes minutes to simulate
MAX_NUMEL: Final = 1 << 44  # of a bucket: 64 TiB of fp32
MAX_NUMBER: Final = 1 << 53  # of a priority, so that any language's JSON reads it
MAX_PROCESSES: Final = 1 << 20
MAX_LETTERS: Final = 1000  # of a name
_FIELDS: Final = frozenset(("tensors", "numel", "parts", "part_numel", "priority", "codec", "option", "servers"))


def load_plan(text: str) -> Plan:
    """The plan in a file. Raises UsageError naming the file and the field."""
    return read_plan(read_strictly(Path(text), f"plan {text}"), text)


def read_plan(document: Any, source: str) -> Plan:
    """A plan from its JSON document, of any known version. Raises UsageError naming the field."""
    if not isinstance(document, Mapping) or not isinstance(document.get("buckets"), list):
        raise UsageError(f'{source}: expected an object with a list "buckets"')
    version = _version(document.get("version"), source)
    for key in document if version > 1 else ():
        if key not in FIELDS and key not in FIGURES:
            raise UsageError(
                f"{source}: unknown field {shown(key)}; expected some of {', '.join(FIELDS)}, and figures that psgc plan writes; correct or remove it"
            )
    prediction = document.get("prediction", {})
    if not isinstance(prediction, Mapping):
        raise UsageError(f"{source}: field prediction is {shown(prediction)}, expected an object")
    model = _name(document.get("model", ""), "model", source)
    if version == 1:
        name, machines, shape = _name(document.get("cluster", ""), "cluster", source), None, NOT_KNOWN
    else:
        name, machines, shape = _cluster(document.get("cluster"), source)
    entries = document["buckets"]
    buckets = tuple(_bucket(entry, f"{source}: buckets[{number}]", version, shape) for number, entry in enumerate(entries))
    _check_once(buckets, source)
    if sum(bucket.parts for bucket in buckets) > MAX_ALL_PARTS:
        raise UsageError(f"{source}: buckets have {sum(bucket.parts for bucket in buckets):,} parts together, at most {MAX_ALL_PARTS:,}")
    order = None
    if version > 1 and document.get("issue_order") is not None:
        order = _order(document["issue_order"], buckets, machines, source)
    return Plan(model, name, buckets, dict(prediction), machines, shape, order)


def _version(version: Any, source: str) -> int:
    known = " and ".join(map(str, VERSIONS))
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise UsageError(f"{source}: field version is {shown(version)}, expected one of {known}; make the plan anew with psgc plan")
    if version > VERSION:
        raise UsageError(
            f"{source}: field version is {shown(version)}, expected one of {known}: a newer psgc wrote it; use that, or make the plan anew "
            f"with this one's psgc plan"
        )
    return version


def _name(value: Any, key: str, source: str) -> str:
    """The name in a field. Raises UsageError unless it is a printable text on one line."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_LETTERS:
        raise UsageError(f"{source}: field {key} is {shown(value)}, expected a text on one line, of {MAX_LETTERS} letters at most")
    return value


def _cluster(value: Any, source: str) -> tuple[str, Cluster | None, JobShape]:
    """The cluster's name; the cluster, if the document has all of it; and the job's shape, as far as it is given."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{source}: field cluster is {shown(value)}, expected an object")
    for inner in (value, *(one for one in value.values() if isinstance(one, Mapping))):
        for key in inner:
            if not key.isidentifier() or len(key) > 40:
                raise UsageError(f"{source}: cluster: unknown field {shown(key)}")
    texts = {key: _name(value.get(key, ""), f"cluster.{key}", source) for key in ("name", "source")}
    if "nodes" in value:
        machines = read_cluster({**value, **texts}, texts["name"], f"{source}: cluster")
        if max(machines.gpus, machines.servers) > MAX_PROCESSES:
            raise UsageError(
                f"{source}: field cluster has {machines.gpus:,} workers and {machines.servers:,} servers, at most {MAX_PROCESSES:,} of each"
            )
        return machines.name, machines, shape_of(machines)
    for key in value:
        if key not in ("name", "source", "workers", "servers"):
            raise UsageError(
                f"{source}: cluster: unknown field {key!r} beside no nodes; expected a whole cluster, or name, workers and servers"
            )
    place = f"{source}: cluster"
    counts = [_whole(value, key, 1, place, MAX_PROCESSES) if key in value else None for key in ("workers", "servers")]
    return texts["name"], None, JobShape(*counts)


def _bucket(entry: Any, place: str, version: int, shape: JobShape) -> PlannedBucket:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{place}: expected an object with tensors, numel, parts, priority, codec and option")
    for key in entry if version > 1 else ():
        if key not in _FIELDS:
            raise UsageError(f"{place}: unknown field {shown(key)}; expected some of {', '.join(sorted(_FIELDS))}")
    tensors, codec, option = entry.get("tensors"), entry.get("codec"), entry.get("option")
    if not _texts(tensors) or not tensors:
        raise UsageError(f"{place}: field tensors is {shown(tensors)}, expected a list of names")
    for name in tensors:
        _name(name, "tensors", place)
    if not isinstance(codec, str) or not codec:
        raise UsageError(f"{place}: field codec is {shown(codec)}, expected a codec's text; none for none")
    _name(codec, "codec", place)
    if not _texts(option):
        raise UsageError(f"{place}: field option is {shown(option)}, expected a list of actions")
    numel, parts = _whole(entry, "numel", 1, place, MAX_NUMEL), _whole(entry, "parts", 1, place)
    priority = _whole(entry, "priority", -MAX_NUMBER, place, MAX_NUMBER)
    part_numel = _whole(entry, "part_numel", 1, place, MAX_NUMEL) if "part_numel" in entry else 0
    if parts > min(numel, MAX_PARTS):
        raise UsageError(f"{place}: field parts is {shown(parts)}, expected no more than its {numel} elements, and {MAX_PARTS:,} at most")
    check_option(tuple(option), place)
    servers = _servers(entry["servers"], parts, tuple(option), shape.servers, place) if version > 1 and "servers" in entry else ()
    return PlannedBucket(tuple(tensors), numel, parts, priority, codec, tuple(option), part_numel, servers)


def _servers(value: Any, parts: int, option: tuple[str, ...], servers: int | None, place: str) -> tuple[int, ...]:
    if not pushes(option):
        raise UsageError(f"{place}: field servers is given, but the option {' '.join(option)} has no servers; leave it out")
    if not isinstance(value, list) or len(value) != parts:
        raise UsageError(f"{place}: field servers is {shown(value)}, expected a list of {parts} servers, one for each part")
    most = MAX_PROCESSES if servers is None else servers
    for server in value:
        if isinstance(server, bool) or not isinstance(server, int) or not 0 <= server < most:
            known = f"below {most}, the cluster's servers" if servers is not None else f"below {most}"
            raise UsageError(f"{place}: field servers has {shown(server)}, expected a whole number of at least 0 and {known}")
    return tuple(value)


def _order(value: Any, buckets: Sequence[PlannedBucket], machines: Cluster | None, source: str) -> Mapping[str, tuple[Issue, ...]]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{source}: field issue_order is {shown(value)}, expected an object with a list for each lane")
    if machines is None:
        raise UsageError(
            f"{source}: field issue_order is given, but no cluster whose lanes it is of; leave it out, or give the whole cluster"
        )
    found = {}
    for lane, issues in value.items():
        place = f"{source}: issue_order[{shown(lane)}]"
        if not isinstance(issues, list):
            raise UsageError(f"{place} is {shown(issues)}, expected a list of [bucket, part, step]")
        for number, one in enumerate(issues):
            if not isinstance(one, list) or len(one) != 3 or not all(isinstance(n, int) and not isinstance(n, bool) for n in one):
                raise UsageError(f"{place}[{number}] is {shown(one)}, expected [bucket, part, step], whole numbers")
        found[lane] = tuple(Issue(*one) for one in issues)
    check_order(found, buckets, machines, source)
    return found


def _texts(value: Any) -> TypeGuard[Sequence[str]]:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def _whole(entry: Mapping[str, Any], key: str, least: int, place: str, most: int | None = None) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{place}: field {key} is {shown(value)}, expected a whole number {bound}")
    return value


def _check_once(buckets: Sequence[PlannedBucket], source: str) -> None:
    seen: set[str] = set()
    for bucket in buckets:
        for name in bucket.tensors:
            if name in seen:
                raise UsageError(f"{source}: tensor {name!r} stands in two places")
            seen.add(name)
