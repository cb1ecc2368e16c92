"""What becomes of a job on several hosts when one of them is lost: whether it goes on, and which spare host takes the place. Pure: time is passed in.

A host is lost where the launcher's connection to it has ended and nothing that ran there has said why. What still runs there (only the connection was lost)
ends by itself, PSGC_DEAD_S after the launcher's last sign of life. No other host takes the place before that: a rank has one process at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from psgc.config import Config
from psgc.launch.job.placing import Place
from psgc.wire.messages import NUMBERS_A_HOST


def check_reserve(config: Config, reserve: Sequence[Place]) -> str:
    """What is wrong with the spare hosts; "" if nothing."""
    if not reserve or config.on_worker_loss != "stop":
        return ""
    return (
        f"the hosts' file has {len(reserve)} spare host{'s' * (len(reserve) > 1)}, which take the places of hosts whose workers are lost, but a worker's death "
        f"ends the job; set PSGC_ON_WORKER_LOSS to wait or shrink"
    )


@dataclass(slots=True)
class LostHosts:
    """config: of the job. places: which nobody has taken yet, each with the time from which another host may."""

    config: Config
    places: list[tuple[float, Place]] = field(default_factory=list)
    _followed: dict[int, int] = field(default_factory=dict)  # by node, how many hosts have followed one another there

    def ends(self, place: Place, reserve: Iterable[Place]) -> str | None:
        """Why the job ends with what the place runs; None if it goes on. reserve: spare hosts that can be reached."""
        if place.spare:
            return None
        if place.scheduler:
            return "it had the scheduler"
        if place.servers and not self.config.replicas:
            return "what its servers had kept is lost with it (PSGC_REPLICAS=1 keeps it on another host, too)"
        if place.node < 0 or self.config.on_worker_loss == "shrink":
            return None
        if self.config.on_worker_loss == "stop":
            return "a worker's death ends the job (PSGC_ON_WORKER_LOSS)"
        free = list(reserve)
        for each in sorted((place, *(lost for _, lost in self.places)), key=lambda each: -each.workers):
            spare = smallest(free, each)
            if spare is None:
                break
            free.remove(spare)
        else:
            return None
        return "no spare host can take its place (`spare HOST` in the hosts' file)"

    def lost(self, place: Place, now: float) -> None:
        """The job goes on without it."""
        if place.node >= 0:
            # By then the scheduler knows, too, that the processes there are dead.
            self.places.append((now + self.config.dead_s + 2 * self.config.heartbeat_s, place))

    def due(self, now: float) -> Place | None:
        """A lost host's place that another may take now, which is then no longer to be taken."""
        for number, (when, place) in enumerate(self.places):
            if when <= now:
                del self.places[number]
                return place
        return None

    def taken(self, spare: Place, place: Place) -> tuple[Place, dict[str, str]]:
        """The spare host's part of the job from now on, and settings for it. Its servers are elsewhere already, or lost."""
        count = self._followed[place.node] = self._followed.get(place.node, 0) + 1
        own = replace(place, host=spare.host, servers=0, first_server=0, scheduler=False)
        return own, {"PSGC_INCARNATION": str(1 + count * NUMBERS_A_HOST)}


def smallest(reserve: Iterable[Place], place: Place) -> Place | None:
    """The spare host that takes the place: the one with least room that fits, so that larger ones are left for larger places."""
    return min((one for one in reserve if fits(one, place)), key=lambda one: one.host.slots or math.inf, default=None)


def fits(spare: Place, place: Place) -> bool:
    """Whether the spare host can take the place: it is another host, and has room."""
    return spare.spare and spare.host.name != place.host.name and (not spare.host.slots or spare.host.slots >= place.workers)
