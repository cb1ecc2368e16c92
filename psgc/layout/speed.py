"""How quick the slowest of a job's connections to servers is, and what follows for how finely gradients are cut and how far ranks may push ahead. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

# On a connection that a part keeps busy for longer than this, TCP's sharing of a server's link shows: one rank's parts come sooner than another's, a part's sum
# waits for its slowest push, and the link's other direction idles until then. With 4 ranks, whose gradients are cut into 64 parts, at 0.2 Gbit/s, a step takes
# a seventh less where ranks push at most so many parts ahead of the sums; or what a connection carries until a server's word has come, if that is more.
SLOW_PART_S: Final = 0.005
PARTS_AHEAD: Final = 3
WORD_S: Final = 0.01  # besides two round trips: a busy machine hands messages on no sooner
LEAST_PARTS: Final = 8  # of a server: with fewer, a rank that waits costs as much as the sharing


class Speed(NamedTuple):
    """rate: bytes a second in one direction, 0 if none has been measured or it cannot be told; round_trip_us: of the smallest message."""

    rate: int = 0
    round_trip_us: int = 0

    def slower(self, other: Speed) -> Speed:
        """What both have at least."""
        return Speed(min(filter(None, (self.rate, other.rate)), default=0), max(self.round_trip_us, other.round_trip_us))

    def ahead(self, part_bytes: int, bytes_of_a_server: float) -> int:
        """How many bytes each rank may push to a server ahead of the sums; 0: as many as it likes. part_bytes: of the largest payload; bytes_of_a_server: what
        a rank pushes to it in a step."""
        if part_bytes <= SLOW_PART_S * self.rate or LEAST_PARTS * part_bytes > bytes_of_a_server or not self.rate:
            return 0
        return max(PARTS_AHEAD * part_bytes, int(self.rate * (WORD_S + 2e-6 * self.round_trip_us)))


UNKNOWN: Final = Speed()
