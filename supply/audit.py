"""``make audit``: known flaws of the libraries in the locks, by pip-audit; says so where no advisories can be had."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LOCKS = ("libraries.lock", "torch.lock", "build.lock")
OFFLINE = "no advisories: the service that has them cannot be reached from this machine. Nothing was checked."


def main() -> int:
    """0 where no flaw is known, 1 where some are or some libraries could not be asked of, 2 where none could."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        locks = [part for name in LOCKS for part in ("--requirement", str(HERE / name))]
        options = ["--require-hashes", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        command = [sys.executable, "-m", "pip_audit", *options, "--output", str(report), *locks]
        subprocess.run(command, capture_output=True, check=False)
        libraries = json.loads(report.read_text(encoding="utf-8"))["dependencies"] if report.exists() else []
    return verdict(libraries)


def verdict(libraries: list[dict[str, Any]]) -> int:
    """Say what pip-audit found of each library: it ends with 0 also where it could ask of none."""
    audited = [each for each in libraries if "skip_reason" not in each]
    if not audited:
        print(OFFLINE, file=sys.stderr)
        return 2
    flaws = [f"{each['name']} {each['version']}: {flaw['id']}" for each in audited for flaw in each["vulns"]]
    print(f"{len(audited)} of {len(libraries)} libraries looked up, {len(flaws)} known flaws", *flaws, sep="\n")
    return 1 if flaws or len(audited) < len(libraries) else 0


if __name__ == "__main__":
    sys.exit(main())
