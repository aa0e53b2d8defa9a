"""`hfpatch prove` fails on a device that computes nothing, and says at which line."""

import json
import subprocess

from tests.dry.conftest import command, environment


def test_prove_fails_where_nothing_is_computed(table, tmp_path):
    words = command("-m", "hfpatch", "prove", "--small", "--out", str(tmp_path))
    run = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=500)
    assert run.returncode == 1, run.stderr[-3000:]
    page = (tmp_path / "prove.md").read_text()
    row = json.loads((tmp_path / "prove.json").read_text())
    assert "SOMETHING IS WRONG" in page and "all is well" not in page
    assert not row["ok"] and row["failed"][0]["what"].startswith("model")
    assert "RuntimeError" not in page, "the numbers fail, not the program"
    table("prove --small", "a device that computes nothing", "comparisons", row["checks"])
    failures = run.stderr.count("hfpatch: FAILED")
    table("prove --small", "a device that computes nothing", "of them fail", failures)
