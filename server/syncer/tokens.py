"""Who may enrol: a file with a name and a token in each line, which is read again when it changes: learners are added and revoked while all
train on.

Without a file everyone who has the one token may, under any name.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from psgc.errors import PsgcError
from psgc.wire.learners import is_name, learner_key, learner_number

LEAST_TOKEN = 8  # letters
Stamp = tuple[int, int, int, int]


class Tokens:
    """path: of the file; None: ``token`` is everyone's. Raises PsgcError for a file that cannot be read or is wrong."""

    def __init__(self, path: Path | None, token: str = "") -> None:
        self._path, self._token = path, token
        self._stamp: Stamp | None = None  # of the file as ``names`` has it
        self._said: tuple[Stamp | None, str] | None = None  # what is wrong with it now, and was raised
        self._nobody = secrets.token_hex(32)
        self.names: dict[str, str] = {}
        self._numbers: dict[int, str] = {}
        if path is not None:
            self.read_again()

    def read_again(self) -> bool:
        """Read the file if it has changed. Returns whether it has. Raises PsgcError as when it was made, once for each change of the file; the former list
        stays then."""
        if self._path is None:
            return False
        stamp = None
        try:
            status = self._path.stat()
            stamp = status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size
            if stamp == self._stamp:
                self._said = None
                return False
            names = parsed(self._path.read_text(), str(self._path))
        except (OSError, UnicodeDecodeError) as error:
            self._wrong(stamp, f"syncer: --learners {self._path}: it cannot be read ({getattr(error, 'strerror', None) or error})")
            return False
        except PsgcError as error:
            self._wrong(stamp, str(error))
            return False
        self._stamp, self._said, self.names = stamp, None, names
        self._numbers = {learner_number(name): name for name in names}
        return True

    def _wrong(self, stamp: Stamp | None, text: str) -> None:
        # It is read again and again all the same: what could not be read for a moment need not change to be readable.
        if (stamp, text) != self._said:
            self._said = stamp, text
            raise PsgcError(text) from None

    def key(self, number: int) -> bytes:
        """The key of the learner whose name has this number; of one that is not in the list, a key that nobody has."""
        if self._path is None:
            return learner_key(self._token, number)
        name = self._numbers.get(number)
        return learner_key(self._nobody if name is None else self.names[name], number)

    def admits(self, number: int, key: bytes) -> bool:
        """Whether a learner that has proved itself by ``key`` still may."""
        return self.key(number) == key


def parsed(text: str, where: str) -> dict[str, str]:
    """Tokens by name. Blank lines, and what follows a #, are left out. Raises PsgcError with the line that is wrong."""
    found: dict[str, str] = {}
    numbers: dict[int, str] = {}
    for count, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        at = f"syncer: --learners {where}, line {count}"
        if len(words) != 2 or not is_name(words[0]):
            raise PsgcError(f"{at}: expected a name (letters, digits, . _ -) and a token")
        name, token = words
        if len(token) < LEAST_TOKEN:
            raise PsgcError(f"{at}: the token of {name} has {len(token)} letters, and at least {LEAST_TOKEN} are expected; draw a long one")
        if name in found:
            raise PsgcError(f"{at}: {name} has a token already")
        if (other := numbers.setdefault(learner_number(name), name)) != name:
            raise PsgcError(f"{at}: {name} cannot stand beside {other}, whose name has the same number; choose another name")
        found[name] = token
    return found
