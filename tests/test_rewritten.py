"""The tests' assertions are rewritten once, before several processes collect."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.rewritten import rewrite


def test_a_file_that_was_rewritten_ahead_is_what_pytest_would_make_of_it_and_is_not_rewritten_again(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from _pytest.assertion import rewrite as pytests

    path = tmp_path / "test_sums.py"
    path.write_text("def test_sum():\n    assert sum([1, 1]) == 3\n")
    rewrite(path, pytestconfig)
    assert [kept.name for kept in (tmp_path / "__pycache__").iterdir()] == [f"test_sums{pytests.PYC_TAIL}"]
    monkeypatch.setattr(pytests, "_rewrite_test", lambda *_: pytest.fail("rewritten again"))
    hook = pytests.AssertionRewritingHook(pytestconfig)
    spec = importlib.util.spec_from_file_location("test_sums", path, loader=hook)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    hook.exec_module(module)
    with pytest.raises(AssertionError, match=r"assert 2 == 3\n \+  where 2 = sum\(\[1, 1\]\)"):
        module.test_sum()
    assert "test_sums" not in sys.modules
