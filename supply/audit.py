"""``make audit``: known flaws of the libraries in the locks, by pip-audit; says so where no advisories can be had."""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LOCKS = ("libraries.lock", "torch.lock", "build.lock")
OFFLINE = "no advisories: the service that has them cannot be reached from this machine. Nothing was checked."


def main() -> int:
    """0 where no flaw is known, 1 where some are, 2 where nothing could be asked."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said.json")
        locks = [part for name in LOCKS for part in ("--requirement", str(HERE / name))]
        options = ["--require-hashes", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        command = [sys.executable, "-m", "pip_audit", *options, "--output", str(said), *locks]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not said.exists():
            print(OFFLINE, ended.stderr.strip().splitlines()[-1:] or "", file=sys.stderr)
            return 2
        print(said.read_text(encoding="utf-8"))
        return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
