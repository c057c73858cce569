"""Over the network the same seed gives the same model as in simulation, bit for bit, with every method."""

import base64
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from polyclinic.common.models.network import cpu_supports_bf16
from polyclinic.strategies.registry import STRATEGIES, build_strategy
from tests.federations import needs_of
from tests.network.federated import Federation, connected, undisturbed
from tests.network.real import FULL, ROOT, Coordinator, flwr_server, summary_of, written
from tests.server.commands import needs_real_data

pytestmark = pytest.mark.slow
METHODS = {name: build_strategy(name, {}).site for name in STRATEGIES}
FEDERATED = [name for name, method in METHODS.items() if method.pooled_missing_labels == "no"]


def same_as_simulation(
    coordinator: Coordinator,
    experiment: Path,
    out: Path,
    *overrides: str,
    pages: bool = False,
    elsewhere: str = 'external_test={kind = "digits", image_size = 16}',
) -> dict[str, Any]:
    """Compare model and figures with simulation, both tested elsewhere too; return the network's summary."""
    overrides = (*overrides, elsewhere)
    run = coordinator.run(experiment, out / "network", *overrides, pages=pages, once=True)
    undisturbed(experiment, out / "simulation", *overrides)
    run.succeeds()
    first, second = (summary_of(out / name) for name in ("network", "simulation"))
    assert first["sites"].keys() == second["sites"].keys()
    shared = METHODS[first["method"]].parts.has_global_model  # else the models stay at the hospitals
    assert first["external"] == (second["external"] if shared else None)
    assert second["external"]["mean_auroc"] > 0
    assert first["benefit"] == second["benefit"]
    assert all(list((out / name / "tensorboard").iterdir()) for name in ("network", "simulation"))
    assert first["model_sha256"] == second["model_sha256"]
    return first


Connected = tuple[Coordinator, Path]
"""A coordinator with all its sites connected, and an experiment."""


@pytest.fixture
def partly(federation: Federation) -> Connected:
    """Each site labels other digits."""
    return federation.coordinator, federation.experiment


@pytest.fixture(scope="module")
def fully(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connected]:
    """Each site labels every digit."""
    experiment = written(FULL, folder := tmp_path_factory.mktemp("fully"))
    with connected(experiment, folder / "machine") as (coordinator, _):
        yield coordinator, experiment


SHORT = {"unifed"}
"""What ``make test`` tries here; ``make test-network`` tries all. Surgical aggregation is compared in test_flood."""


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in SHORT else (pytest.mark.network,)) for name in FEDERATED]
)
def test_sites_train_the_model_of_simulation(method: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Sites label different digits, or the same ones where the method needs every class at every site."""
    fixture = "fully" if METHODS[method].traits.needs_full_coverage else "partly"
    coordinator, experiment = request.getfixturevalue(fixture)
    needs = [need for need in needs_of(method) if not need.startswith("partition.")]  # that is the fixture's
    same_as_simulation(coordinator, experiment, tmp_path, f"run.method={method}", *needs)


@pytest.mark.network
@pytest.mark.skipif(not cpu_supports_bf16(), reason="this CPU has no instructions for bfloat16")
def test_sites_that_train_in_bfloat16_train_the_model_of_simulation(partly: Connected, tmp_path: Path) -> None:
    sites = same_as_simulation(*partly, tmp_path, "training.precision=bf16")["sites"]
    assert {site["arithmetic"] for site in sites.values()} == {"bf16, channels_last"}


@pytest.mark.network
def test_models_in_fewer_bits_are_those_of_simulation_where_sites_miss_rounds(
    partly: Connected, tmp_path: Path
) -> None:
    same_as_simulation(
        *partly,
        tmp_path,
        "method.compress_model=int8",
        "method.compress_update=float16",
        "participation.sites_per_round=2",
        "run.rounds=4",
    )


@pytest.mark.network
def test_each_site_chooses_the_fastest_arithmetic_once_and_says_which(partly: Connected, tmp_path: Path) -> None:
    coordinator, experiment = partly
    for name in ("first", "second"):
        coordinator.run(experiment, tmp_path / name, "training.precision=fastest").succeeds()
    first, second = (summary_of(tmp_path / name) for name in ("first", "second"))
    assert first["model_sha256"] == second["model_sha256"]
    chosen = [{name: site["arithmetic"] for name, site in run["sites"].items()} for run in (first, second)]
    assert chosen[0] == chosen[1]
    assert all(chosen[0].values())


@pytest.mark.network
def test_sites_are_better_off_alone_over_the_network_as_in_simulation(partly: Connected, tmp_path: Path) -> None:
    benefit = same_as_simulation(*partly, tmp_path, "evaluation.compare_local=true")["benefit"]
    assert len(benefit) == 3
    assert all(site["benefit"]["mean"]["alone"]["value"] > 0.5 for site in benefit.values())


def private_forms(pem: bytes) -> list[bytes]:
    """A private key's number as bytes, in hexadecimal digits, and as it lies in any base64 of more."""
    load = serialization.load_ssh_private_key if b"OPENSSH" in pem else serialization.load_pem_private_key
    key = load(pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    number = key.private_numbers().private_value
    secret = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return [secret, secret.hex().encode(), *(base64.b64encode(bytes(shift) + secret)[4:-4] for shift in range(3))]


def test_under_secure_aggregation_too_and_no_private_key_is_written_or_printed(
    partly: Connected, tmp_path: Path
) -> None:
    same_as_simulation(*partly, tmp_path, "privacy.secure_aggregation=true", pages=True)
    coordinator, _ = partly
    here = coordinator.folder.parent
    files = {path: path.read_bytes() for folder in (here, tmp_path) for path in folder.rglob("*") if path.is_file()}
    holders = {path for path, content in files.items() if b"PRIVATE KEY" in content}
    sites = [f"{folder.name}.key" for folder in (here / "sites").iterdir()]
    assert sorted(path.name for path in holders) == sorted(["ca.key", "server.key", "signing.key", *sites])
    assert all(path.stat().st_mode & 0o077 == 0 for path in holders)
    texts = {str(path): content for path, content in files.items() if path not in holders}
    for options in ((), ("--json",)):
        status = flwr_server("status", coordinator.folder, *options)
        texts[f"status {options}"] = (status.out + status.err).encode()
    assert len([name for name in texts if name.endswith(".log")]) >= 2 + len(sites)  # the coordinator's, the run's
    secrets = [form for path in holders for form in private_forms(files[path])]
    assert [name for name, text in texts.items() if any(secret in text for secret in secrets)] == []


def test_a_method_that_pools_images_is_refused(partly: Connected, tmp_path: Path) -> None:
    coordinator, experiment = partly
    command = ("run", coordinator.folder, experiment, "--out", tmp_path / "run", "--once")
    ended = flwr_server(*command, "--set", "run.method=centralised")
    assert ended.code == 2
    assert '"centralised" puts all images in one place' in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.network
@needs_real_data
def test_hospitals_with_radiographs_train_the_model_that_simulation_trains(tmp_path: Path) -> None:
    experiment = ROOT / "experiments" / "nih_surgical.toml"
    with connected(experiment, tmp_path / "machine") as (coordinator, _):
        data = tomllib.loads(experiment.read_text(encoding="utf-8"))["data"]
        again = ", ".join(f"{key} = {json.dumps(value)}" for key, value in data.items())
        elsewhere = f"external_test={{{again}}}"
        same_as_simulation(coordinator, experiment, tmp_path, "run.rounds=2", elsewhere=elsewhere)
