"""BytePS's choice of a part's server: a hash of the part's key, whatever the part's size. For comparisons; psgc's own choice is in ``placement``.

BytePS's key of a partition is the number of its tensor, in the order of declaration, times 2^16, plus the partition's own number. Here a bucket's
number takes the tensor's place. Sources: byteps/common/global.cc of version 0.2.5; the mixed mode is of Jiang et al., OSDI 2020, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psgc.errors import UsageError
from psgc.layout.machines import Machines

HASHES: Final = ("djb2", "naive", "built_in", "sdbm", "mixed")
_64_BITS: Final = (1 << 64) - 1
_MURMUR: Final = 0xC6A4A7935BD1E995
_LIBSTDCXX_SEED: Final = 0xC70F6907  # of std::hash<std::string> in GNU's C++ library


def naive(key: int) -> int:
    return ((key >> 16) + key % (1 << 16)) * 9973 & _64_BITS


def djb2(key: int) -> int:
    value = 5381
    for char in str(key).encode():
        value = (value * 33 + char) & _64_BITS
    return value


def sdbm(key: int) -> int:
    value = 0
    for char in str(key).encode():
        value = (value * 65599 + char) & _64_BITS
    return value


def built_in(key: int, coefficient: int = 1) -> int:
    """std::hash<std::string> of the key's decimal digits, as GNU's C++ library has it (MurmurHash64A), times BYTEPS_BUILT_IN_HASH_COEF."""
    text = str(key).encode()
    value = (_LIBSTDCXX_SEED ^ len(text) * _MURMUR) & _64_BITS
    whole = len(text) & ~7
    for start in range(0, whole, 8):
        block = int.from_bytes(text[start : start + 8], "little") * _MURMUR & _64_BITS
        value = (value ^ (block ^ block >> 47) * _MURMUR) * _MURMUR & _64_BITS
    if whole < len(text):
        value = (value ^ int.from_bytes(text[whole:], "little")) * _MURMUR & _64_BITS
    value = (value ^ value >> 47) * _MURMUR & _64_BITS
    return (value ^ value >> 47) * (coefficient & 0xFFFFFFFF) & _64_BITS


@dataclass(frozen=True, slots=True)
class HashPlacement:
    """BytePS's settings: BYTEPS_KEY_HASH_FN, BYTEPS_BUILT_IN_HASH_COEF and BYTEPS_MIXED_MODE_BOUND."""

    function: str = "djb2"
    coefficient: int = 1
    bound: int = 101

    @property
    def text(self) -> str:
        """The settings as the text that a declaration carries."""
        more = {"built_in": f":{self.coefficient}", "mixed": f":{self.bound}"}
        return self.function + more.get(self.function, "")

    @classmethod
    def parse(cls, text: str) -> HashPlacement:
        """The inverse of ``text``. Raises UsageError for any other text."""
        function, _, number = text.partition(":")
        if function not in HASHES or bool(number) != (function in ("built_in", "mixed")) or not (number or "0").isdigit():
            raise UsageError(f"placement {text!r}: expected one of {', '.join(HASHES)}, built_in and mixed with a number, as in mixed:101")
        if function == "built_in":
            return cls(function, coefficient=int(number))
        return cls(function, bound=int(number)) if number else cls(function)

    def check(self, servers: int, nodes: int) -> None:
        """Raise UsageError for settings at which BytePS would abort."""
        if self.function != "mixed":
            return
        if self.bound < servers:
            raise UsageError(
                f"BYTEPS_MIXED_MODE_BOUND={self.bound} is less than the number of servers, {servers}; raise it to as many at least"
            )
        if not nodes <= servers <= 2 * nodes:
            raise UsageError(
                f"BYTEPS_ENABLE_MIXED_MODE=1 with {nodes} worker machine(s) and {servers} server(s): it needs a server on each worker machine, and at "
                f"most as many on other machines, so {nodes} to {2 * nodes} servers; start as many, or leave it out"
            )

    def server(self, tensor: int, part: int, machines: Machines) -> int:
        """The server of one part. Raises UsageError as ``check`` does."""
        key, servers = tensor << 16 | part & 0xFFFF, len(machines.servers)
        if self.function == "mixed":
            return self._mixed(key, machines)
        values = {"naive": naive, "djb2": djb2, "sdbm": sdbm}
        value = built_in(key, self.coefficient) if self.function == "built_in" else values[self.function](key)
        return value % servers

    def _mixed(self, key: int, machines: Machines) -> int:
        """BytePS's mixed mode. In BytePS's numbering, servers on machines without workers come first; psgc's numbers follow from the servers' machines."""
        nodes, servers = machines.nodes or sum(count > 0 for count in machines.workers), len(machines.servers)
        self.check(servers, nodes)
        apart = servers - nodes
        place = mixed(key, nodes, apart, self.bound)
        return sorted(range(servers), key=lambda server: machines.colocated[server])[place]


def mixed(key: int, nodes: int, apart: int, bound: int = 101) -> int:
    """BytePS's number of the server of a key. nodes: worker machines, with a server each; apart: servers on other machines, which come first."""
    ratio = 2.0 * apart * (nodes - 1) / (nodes * (nodes + apart) - 2 * apart) if apart else 0.0
    value = djb2(key) % bound
    if value < ratio * bound:
        return djb2(value) % apart
    return apart + djb2(value) % nodes
