"""Users as tests need them."""

from __future__ import annotations

import pwd

import pytest


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process's user be one of a number alone, as in a container: no HOME, and none in /etc/passwd."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
