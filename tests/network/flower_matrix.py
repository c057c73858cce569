"""One model hash with every pair of a Flower and a Python: in one process, on Ray and over the network.

    make test-flower-matrix [PYTHONS="OTHER/bin/python ..."]

Another Python needs the dependencies alone: ``python3.13 -m venv OTHER`` and ``OTHER/bin/pip install '.[sim]' pytest``.
Each pair is a process of its own, with this tree and the folder of the Flower first on its path. Two small experiments
on digits, surgical aggregation and the same under secure aggregation, which Ray does not have. Prints a Markdown table,
and ends with 1 if a pair fails or an experiment has more than one hash. All Pythons must have one release of torch and
of NumPy: another release may add floats in another order.
"""

import argparse
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.processes import ROOT

PLAIN, MASKED = "surgical", "secure aggregation"
EXPERIMENTS: Mapping[str, Sequence[str]] = {PLAIN: (), MASKED: ("privacy.secure_aggregation=true",)}
"""Experiment -> its settings beside those of the network tests: two rounds of three hospitals."""
LIBRARIES = ("torch", "numpy", "ray", "grpcio", "protobuf")
HASH_CHARACTERS = 16
CELL_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Cell:
    """The results of one pair.

    Attributes:
        libraries: Library -> its version.
        hashes: Experiment -> way of running -> SHA-256 of the model.
    """

    flower: str
    python: str
    libraries: Mapping[str, str]
    hashes: Mapping[str, Mapping[str, str]]


def measure_cell() -> Cell:
    """Run both experiments with this process's Flower and Python."""
    # Here: only a cell needs the tests' programs, and pytest with them.
    from tests.network.federated import connected, hash_in, undisturbed
    from tests.network.real import PARTIAL, flwr_sim, settings, written

    hashes: dict[str, dict[str, str]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        experiment = written(PARTIAL, folder)
        with connected(experiment, folder / "machine") as (coordinator, _):
            for number, (title, overrides) in enumerate(EXPERIMENTS.items()):
                out = folder / f"run-{number}"
                coordinator.run(experiment, out / "network", *overrides, once=True).succeeds()
                hashes[title] = {
                    "network": hash_in(out / "network"),
                    "inline": undisturbed(experiment, out / "inline", *overrides),
                }
        ended = flwr_sim("run", experiment, "--backend", "ray", "--out", folder / "ray", *settings())
        assert ended.code == 0, ended.err
        hashes[PLAIN]["ray"] = hash_in(folder / "ray")
    has_grpc = importlib.util.find_spec("flwr.proto.fleet_pb2_grpc") is not None
    flower = version("flwr") + ("" if has_grpc else ", no gRPC services")
    return Cell(flower, platform.python_version(), {name: version(name) for name in LIBRARIES}, hashes)


def run_cell(python: Path, flower: Path) -> Cell | None:
    """Run a pair as a process of its own, and return its results; None if it fails.

    Args:
        python: The interpreter.
        flower: Folder in which a release of Flower is installed without its dependencies.
    """
    path = os.pathsep.join((str(flower.absolute()), str(ROOT)))
    command = (str(python.absolute()), "-m", "tests.network.flower_matrix", "--cell")
    surroundings = os.environ | {"PYTHONPATH": path}
    ended = subprocess.run(
        command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=CELL_TIMEOUT_S, check=False
    )
    if ended.returncode:
        print(f"{python} with {flower}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}", file=sys.stderr)
        return None
    return Cell(**json.loads(ended.stdout.splitlines()[-1]))


def print_rows(cell: Cell) -> None:
    """Print a row of the Markdown table for each experiment of a pair."""
    for title, ways in cell.hashes.items():
        hashes = [ways.get(way, "-")[:HASH_CHARACTERS] for way in ("inline", "ray", "network")]
        print("|", " | ".join((cell.flower, cell.python, title, *hashes)), "|", flush=True)


def find_faults(cells: Sequence[Cell]) -> list[str]:
    """Return a sentence for each experiment and library of which the cells have more than one hash or version."""
    faults = []
    for title in EXPERIMENTS:
        hashes = {sha256[:HASH_CHARACTERS] for cell in cells for sha256 in cell.hashes[title].values()}
        if len(hashes) > 1:
            faults.append(f"{title}: one hash was expected, these came: {', '.join(sorted(hashes))}")
    for library in ("torch", "numpy"):
        versions = {cell.libraries[library] for cell in cells}
        if len(versions) > 1:
            advice = "install the same one for each Python"
            faults.append(f"{library}: one version was expected, these came: {', '.join(sorted(versions))}; {advice}")
    return faults


def main() -> None:
    """Run all pairs one after the other, and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, nargs="+", default=[Path(sys.executable)], help="interpreters")
    parser.add_argument("--flower", type=Path, nargs="+", default=[], help="folders, one for each Flower")
    parser.add_argument("--cell", action="store_true", help="run one pair in this process, and print it as JSON")
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(vars(measure_cell())))
        return
    cells: list[Cell] = []
    failed = False
    print(
        "| Flower | Python | experiment | inline | Ray | network |", "| --- | --- | --- | --- | --- | --- |", sep="\n"
    )
    for python, flower in itertools.product(arguments.python, arguments.flower):
        cell = run_cell(python, flower)
        if cell is None:
            failed = True
        else:
            print_rows(cell)
            cells.append(cell)
    for version_of_python, libraries in {cell.python: cell.libraries for cell in cells}.items():
        print(f"Python {version_of_python}: {', '.join(' '.join(pair) for pair in libraries.items())}")
    faults = find_faults(cells)
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(1 if faults or failed else 0)


if __name__ == "__main__":
    main()
