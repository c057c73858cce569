"""The final model's SHA-256 of every method, and of each wrapper on one: the same before and after a change.

    python benchmarks/model_hashes.py > before.json       # at the old commit
    python benchmarks/model_hashes.py --like before.json  # at the new one; ends with 1 where a hash differs

Three sites of scikit-learn's digits, four rounds, in one process or on Ray. The hashes depend on the libraries and the
processor: compare runs of one environment only. Ray has no secure aggregation; that run is left out there.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from polyclinic.strategies.registry import STRATEGIES
from tests.federations import federation
from tests.hashed_runs import cases


def model_sha256(overrides: Iterable[str]) -> str:
    """The hash that a run ends with."""
    with tempfile.TemporaryDirectory() as folder:
        return str(federation(Path(folder), *overrides)["model_sha256"])


def main() -> None:
    """Print the hashes as JSON; compare them with earlier ones where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("inline", "ray"), default="inline")
    parser.add_argument("--only", nargs="*", help="names of runs")
    parser.add_argument("--like", type=Path, help="JSON of an earlier run of this program")
    arguments = parser.parse_args()
    results: dict[str, str] = {}
    for name, overrides in cases(STRATEGIES).items():
        if arguments.only and name not in arguments.only:
            continue
        if arguments.backend == "ray" and name == "surgical+secagg":
            continue  # Ray refuses it: its sites keep no secrets in memory from message to message
        results[name] = model_sha256([*overrides, f"simulation.backend={arguments.backend}"])
        print(f"{name:24} {results[name][:16]}", file=sys.stderr, flush=True)
    print(json.dumps(results, indent=1))
    if arguments.like:
        earlier = json.loads(arguments.like.read_text(encoding="utf-8"))
        differ = [name for name, sha256 in results.items() if sha256 != earlier.get(name)]
        print(f"{len(results) - len(differ)} of {len(results)} equal; different: {differ}", file=sys.stderr)
        sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
