"""What carries the collectives of gradients on GPUs: chosen alike by all ranks from what each has told."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from psgc.errors import ConfigError
from psgc.program.backends import Facts, backend_of

OWN = {rank: Facts(f"host{rank // 2}", f"GPU-{rank}", "2.27.3") for rank in range(4)}


def test_ranks_with_a_gpu_each_exchange_from_gpu_to_gpu() -> None:
    for asked in ("auto", "nccl"):
        members = {rank: replace(facts, asked=asked) for rank, facts in OWN.items()}
        for order in permutations(members):  # whatever was told first
            assert backend_of({rank: members[rank] for rank in order}) == (True, "4 ranks have a GPU each, and NCCL 2.27.3")


OBSTACLES = {
    "ranks 1 and 3 share a GPU": {3: replace(OWN[3], gpu="GPU-1")},
    "the gradients of rank 2 do not lie on a GPU": {2: replace(OWN[2], gpu="")},
    "the torch of rank 0 has no NCCL": {0: replace(OWN[0], nccl="")},
    "rank 0 has NCCL 2.27.3, and rank 1 has 2.21.5": {1: replace(OWN[1], nccl="2.21.5")},
    "rank 2 has PSGC_COLLECTIVES=host": {2: replace(OWN[2], asked="host")},
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_other_groups_go_through_the_hosts_memory_and_are_refused_where_nccl_was_asked_for(obstacle: str) -> None:
    members = OWN | OBSTACLES[obstacle]
    for order in permutations(members):
        assert backend_of({rank: members[rank] for rank in order}) == (False, obstacle)
        asking = {rank: replace(members[rank], asked="nccl") if rank in (1, 3) else members[rank] for rank in order}
        if any(facts.asked == "nccl" for facts in asking.values()):
            with pytest.raises(ConfigError) as refused:
                backend_of(asking)
            assert str(refused.value) == (
                f"rank 1 has PSGC_COLLECTIVES=nccl, but the group of ranks 0, 1, 2, 3 cannot have it: {obstacle}; mend that, "
                "or set PSGC_COLLECTIVES=host on every rank"
            )


def test_encrypted_jobs_go_from_gpu_to_gpu_within_a_host_alone() -> None:
    encrypted = {rank: replace(facts, encrypt=True) for rank, facts in OWN.items()}
    assert backend_of(encrypted) == (False, "PSGC_ENCRYPT=1, and NCCL encrypts nothing between hosts")
    assert backend_of({rank: encrypted[rank] for rank in (0, 1)}).on_device, "both on host0"


def test_facts_travel_as_bytes() -> None:
    for facts in (*OWN.values(), replace(OWN[0], encrypt=True)):
        assert Facts.decode(facts.encode()) == facts
