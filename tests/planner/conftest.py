"""Each test plans anew."""

import pytest

from hfpatch.planner import remembered


@pytest.fixture(autouse=True)
def no_plan_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(remembered, "FOLDER", tmp_path / "plans")
