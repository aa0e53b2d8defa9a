"""The kernels' tests on this machine's GPU: pytest over tests/ops and tests/kernels, a row a file.

python scripts/gpu/kernel_tests.py --out $OUT
"""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common


def main(argv=None) -> int:
    made = common.parser("kernel_tests", __doc__)
    made.add_argument("--tests", nargs="+", default=["tests/ops", "tests/kernels"])
    args = common.parse(made, argv)
    rows = common.Rows(args, "kernel_tests")
    report = Path(args.out).resolve() / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *args.tests]
    # A machine without pytest-timeout does not know its option.
    command += ["-W", "ignore::pytest.PytestConfigWarning"]
    command += ["-k", "tiny", "-x"] if args.small else []
    try:
        code = subprocess.run(command, cwd=common.ROOT, timeout=rows.left()).returncode
    except subprocess.TimeoutExpired:
        code = None
    if not report.exists():
        rows.add(left_out="tests", why="the time was over" if code is None else f"code {code}")
        return 1
    files: dict = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("classname") or case.get("name")
        row = files.setdefault(name, {"file": name, "passed": 0, "failed": 0, "skipped": 0})
        bad = [child for child in case if child.tag in ("failure", "error")]
        kind = "skipped" if case.find("skipped") is not None else "passed"
        row["failed" if bad else kind] += 1
        if bad:
            message = (bad[0].get("message") or "").split("\n")[0][:200]
            rows.add(test=f"{name}::{case.get('name')}", error=message)
    for row in files.values():
        rows.add(**row)
    report.unlink()
    return 0 if code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
