"""What codecs keep, as entries of a checkpoint of ``torch.distributed.checkpoint``: each rank's own, read by the ranks that need it.

Owns the entries' form: an optimizer's ``residual_state_dict()``, whose tensors stay tensors, and the rest of which is one more tensor (JSON as bytes), so that
nothing in a checkpoint is a pickle of psgc's.

    {"rank3": {"meta": uint8, "0": tensor, "1": tensor, ...}}      meta: the state, with a number in place of each tensor; the rank is the whole job's, though
                                                                   those in the state may be of a mesh's group
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from psgc.errors import UsageError
from psgc.torch.state.saved import described_part, part_of, same_part

META: Final = "meta"
PLACE: Final = "\0tensor"  # no parameter has such a name
RANK: Final = "rank"
Entries = dict[str, dict[str, torch.Tensor]]


class KeepsState(Protocol):
    """An optimizer or a hook of psgc's whose codecs keep something."""

    def residual_state_dict(self) -> dict[str, Any]: ...

    def load_residual_state_dict(self, states: Any) -> None: ...


@runtime_checkable
class KeepsMesh(Protocol):
    """A hook whose ranks keep slices of parameters: where they are of another mesh now, it reads others' states, too."""

    def needed_of_mesh(self, mesh: Sequence[Sequence[int]]) -> tuple[set[int], set[int]] | None: ...


def state_dict(source: KeepsState) -> Entries:
    """What the codecs of an optimizer, or of a hook, keep on this rank, for the dictionary that ``torch.distributed.checkpoint.save`` or ``async_save`` gets:

        dcp.save({"model": model.state_dict(), "psgc": psgc.state_dict(optimizer)}, checkpoint_id=folder)

    Every rank calls it, between the same two steps; it has copies, so training may go on while they are written. The entries' names have the rank in them:
    each rank writes its own, also where the model's are the same on all. ``load_state_dict`` reads them, with any number of workers and servers.
    """
    state = source.residual_state_dict()
    tensors: list[torch.Tensor] = []
    meta = json.dumps(_without_tensors(state, tensors)).encode()
    entries = {META: torch.frombuffer(bytearray(meta), dtype=torch.uint8)}
    return {f"{RANK}{state.get('job_rank', state['rank'])}": entries | {str(number): tensor for number, tensor in enumerate(tensors)}}


def load_state_dict(source: KeepsState, checkpoint: str | os.PathLike[str] | StorageReader, key: str = "psgc") -> None:
    """Go on from what ``state_dict`` has given to a checkpoint, under ``key`` in the saved dictionary. Every rank calls it where it would call
    ``source.load_residual_state_dict()``: with as many workers as before training goes on bit for bit, with more or fewer what all had not sent is
    redistributed, and its sum stays the same; so it is for a model that FSDP has sharded where its mesh is another. A rank reads what it needs: its own, or
    that of the ranks whose residuals fall to it. No process group is needed.

    checkpoint: the folder, or a reader of torch.distributed.checkpoint.
    Raises UsageError for a folder without a whole checkpoint, and for one that has no such entries.
    """
    from psgc.torch.session.api import current_session

    session = current_session()
    reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(os.fspath(checkpoint))
    stored = _stored(reader, checkpoint, key)
    metas = _read(reader, key, {name: {META: entries[META]} for name, entries in sorted(stored.items()) if META in entries})
    every = {name: json.loads(entries[META].numpy().tobytes()) for name, entries in metas.items()}
    members = [name for name, state in every.items() if same_part(part_of(state), session.part)]  # in the order of the group's ranks
    if every and not members:
        kept = " and ".join(dict.fromkeys(described_part(part_of(state)) for state in every.values()))
        raise UsageError(
            f"load_state_dict: {checkpoint}: has what ranks of {kept} kept, and this rank is of {described_part(session.part)}, which holds another part of "
            f"the model; go on with the mesh that the other dimensions had, or leave load_state_dict() out to begin with empty residuals"
        )
    states = {int(every[name]["rank"]): every[name] for name in members}
    ranks, rank, size, saved = sorted(states), session.rank, session.size, len(states)
    if ranks != list(range(saved)) or len(metas) < len(stored) or any(state["size"] != saved for state in states.values()):
        raise UsageError(
            f"load_state_dict: {checkpoint}: has entries of rank(s) {', '.join(map(str, sorted(stored)))}, not of all ranks of one job"
        )
    mesh = states[0].get("mesh")
    needed = source.needed_of_mesh(mesh) if mesh is not None and isinstance(source, KeepsMesh) else None
    if needed is None and saved == size:
        own = states[rank]
        tensors = _read(reader, key, {members[rank]: {str(number): stored[members[rank]][str(number)] for number in _places(own)}})
        source.load_residual_state_dict(_with_tensors(own, tensors[members[rank]]))
        return
    own_, servers = needed or ({*ranks[rank::size], rank % saved},) * 2
    for other, state in states.items():  # of all others only what ranks have each for themselves is looked at
        if other not in own_:
            state["memories"] = {}
            state["layouts"] = (
                {} if other else {kind: [layout | {"exact": {}} for layout in all_] for kind, all_ in state["layouts"].items()}
            )
        if other not in servers:
            state["servers"] = {}
    wanted = {
        member: {str(number): stored[member][str(number)] for number in _places(states[other])} for other, member in enumerate(members)
    }
    tensors = _read(reader, key, wanted)
    source.load_residual_state_dict([_with_tensors(states[other], tensors[member]) for other, member in enumerate(members)])


def _stored(reader: StorageReader, checkpoint: object, key: str) -> dict[int, dict[str, TensorStorageMetadata]]:
    """By rank and name, what the checkpoint has under ``key``."""
    try:
        metadata: Metadata = reader.read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"load_state_dict: {checkpoint}: no whole checkpoint is there ({type(error).__name__}: {error})") from None
    found: dict[int, dict[str, TensorStorageMetadata]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        begin, _, rest = name.partition(f"{key}.{RANK}")
        rank, _, number = rest.partition(".")
        if not begin and rank.isdigit() and isinstance(entry, TensorStorageMetadata):
            found.setdefault(int(rank), {})[number] = entry
    if not found:
        kept = ", ".join(sorted({name.split(".")[0] for name in metadata.state_dict_metadata})) or "nothing"
        raise UsageError(f"load_state_dict: {checkpoint}: has nothing of psgc's under {key!r}; it has {kept}")
    return found


def _read(reader: StorageReader, key: str, wanted: Mapping[int, Mapping[str, TensorStorageMetadata]]) -> dict[int, dict[str, torch.Tensor]]:
    found = {
        rank: {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        for rank, entries in wanted.items()
    }
    flat = {f"{key}.{RANK}{rank}.{name}": tensor for rank, entries in found.items() for name, tensor in entries.items()}
    if flat:
        state_dict_loader.load(flat, storage_reader=reader, no_dist=True)  # each rank reads others' entries
    return found


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """As JSON has it. Tensors go to ``tensors``, as copies."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().cpu().clone())
        return {PLACE: len(tensors) - 1}
    if isinstance(value, Mapping):
        return {str(name): _without_tensors(each, tensors) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(each, tensors) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {PLACE}:
            return tensors[str(value[PLACE])]
        return {name: _with_tensors(each, tensors) for name, each in value.items()}
    return [_with_tensors(each, tensors) for each in value] if isinstance(value, list) else value


def _places(value: Any) -> Iterator[int]:
    """The numbers of the tensors that are still in it."""
    if isinstance(value, dict) and value.keys() == {PLACE}:
        yield value[PLACE]
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _places(each)


__all__ = ["load_state_dict", "state_dict"]
