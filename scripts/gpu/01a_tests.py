"""The kernels' part of the test suite on this machine's GPU: each op, output and gradient, against
float64.

python scripts/gpu/01a_tests.py --out $OUT
"""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common

WORDS = """
The tests under tests/ops and tests/kernels, run by pytest on the GPU: the same files that a CPU
runs on the plain versions and under Triton's interpreter. A row a file; every failure is named
below the table.
"""


def main(argv=None) -> int:
    made = common.parser("01a_tests", __doc__)
    made.add_argument(
        "--tests", nargs="+", default=["tests/ops", "tests/kernels"], help="files or folders"
    )
    made.add_argument("--all", action="store_true", help="the long grids too")
    args = common.parse(made, argv)
    sheet = common.Sheet(args)
    report = sheet.out / "01a_tests.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *args.tests,
    ]
    # a machine without pytest-timeout does not know its option
    command += ["-W", "ignore::pytest.PytestConfigWarning"]
    command += ["--all"] if args.all else []
    # One file, few of its cases: enough to know that the report is read right.
    command += ["-k", "tiny", "-x"] if args.small else []
    try:
        code = subprocess.run(
            command, cwd=common.ROOT, timeout=sheet.left() + common.OVERTIME
        ).returncode
    except subprocess.TimeoutExpired:
        code = None
    if not report.exists():
        sheet.skip(
            "tests",
            "no report: the time was over" if code is None else f"pytest ended with code {code}",
        )
        sheet.page("The kernels' tests on the GPU", WORDS)
        return 1
    files: dict = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("classname") or case.get("name")
        row = files.setdefault(
            name, {"file": name, "passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0}
        )
        bad = [child for child in case if child.tag in ("failure", "error")]
        kind = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        row[kind] += 1
        row["seconds"] += float(case.get("time", 0))
        if bad:
            sheet.skip(
                f"FAILED {name}::{case.get('name')}",
                (bad[0].get("message") or "").split("\n")[0][:200],
            )
    for row in files.values():
        sheet.add(**row)
    report.unlink()
    sheet.page("The kernels' tests on the GPU", WORDS)
    return 0 if code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
