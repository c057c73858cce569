"""Which files of our programs another account of the same machine can read, where the machine's own rules allow all.

Each test runs the programs and lists every file that they leave, so that a new file must be added here or be private.
"""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.federations import few_digits
from tests.network.real import (
    Coordinator,
    Machine,
    Site,
    exported,
    flwr_client,
    flwr_server,
    flwr_sim,
    machine,
    settings,
    written,
)
from tests.server.commands import Ended

PROGRAM = "import os, sys; os.umask(0); from {}.cli import main; main(sys.argv[1:])"


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Two sites that keep their optimisers' state, and compare the model with one of their own."""
    text = f"""
data = {few_digits()}
[run]
method = "surgical"
rounds = 2
keep_updates = true
[model]
architecture = "tiny_cnn"
channels = 1
image_size = 16
[evaluation]
compare_local = true
[simulation]
backend = "inline"
[partition]
kind = "class_subsets"
sites = 2
shared = 10
"""
    return written(text, tmp_path)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path / "machine") as started:
        yield started


def succeeded(ended: Ended) -> None:
    assert ended.code == 0, ended.err


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def is_open(path: Path) -> bool:
    """Whether others or the group may do anything with it."""
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def readable_by_others(folder: Path) -> set[str]:
    """Files below a folder that another account reaches, if it can open the folder itself."""
    reached = set()
    for path in files_of(folder):
        between = [each for each in path.parents if each.is_relative_to(folder) and each != folder]
        if is_open(path) and all(map(is_open, between)):
            reached.add(path.relative_to(folder).as_posix())
    return reached


def hospital(coordinator: Coordinator, images: Path) -> Site:
    """A hospital whose folder was made by hand, and is open."""
    site = coordinator.admit(coordinator.site(images))
    site.folder.chmod(0o755)
    return site


@pytest.mark.usefixtures("lax_umask")
def test_of_a_federation_others_read_no_more_than_settings_requests_and_kits(
    experiment: Path, here: Machine, tmp_path: Path
) -> None:
    coordinator = Coordinator(here)
    folders = exported(experiment, tmp_path / "data")
    assert readable_by_others(tmp_path / "data") == set()
    sites = [hospital(coordinator, images) for images in folders]
    coordinator.start_by("-c", PROGRAM.format("server"), "start", coordinator.folder)
    for site in sites:
        site.start_by("-c", PROGRAM.format("client"), "start", site.folder)
    coordinator.sees(*sites)
    (tmp_path / "run").mkdir()
    command = ("run", coordinator.folder, experiment, "--out", tmp_path / "run", "--sites", 2)
    coordinator.lead("-c", PROGRAM.format("server"), *command).succeeds()
    north = sites[0].folder
    for words in (
        ("check", north),
        ("preview", north, "--out", tmp_path / "seen"),
        ("preview-data", north),
        ("preview-data", north, "--out", tmp_path / "page.html"),
        ("status", north),
        ("audit", "verify", north),
    ):
        succeeded(flwr_client(*words))
    succeeded(flwr_server("status", coordinator.folder))

    for site in sites:
        own = {f"{site.name}.request", f"{site.name}.kit", "site.toml"}
        assert readable_by_others(site.folder) == own
        assert [path for path in files_of(site.folder) if is_open(path) and path.name not in own] == []
        assert "state/audit.jsonl" in {path.relative_to(site.folder).as_posix() for path in files_of(site.folder)}
    for private in (coordinator.folder, tmp_path / "run", tmp_path / "seen"):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert files_of(private) != []
    assert len(files_of(tmp_path / "seen")) == 6
    assert len(files_of(tmp_path / "run" / "updates")) > 4
    secret = [tmp_path / "page.html", *files_of(tmp_path / "seen"), *files_of(tmp_path / "run" / "updates")]
    secret += files_of(tmp_path / "run" / "checkpoints")
    assert [path for path in secret if is_open(path)] == []


@pytest.mark.usefixtures("lax_umask")
def test_of_a_simulation_others_read_nothing_and_in_a_folder_made_for_all_no_images_updates_or_sites_models(
    experiment: Path, tmp_path: Path
) -> None:
    (tmp_path / "shown").mkdir()
    for out in ("run", "shown"):
        succeeded(flwr_sim("run", experiment, "--out", tmp_path / out))
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    (tmp_path / "pictures").mkdir()
    grid = settings("evaluation.sample_grid=true", "evaluation.compare_local=false")
    succeeded(flwr_sim("run", experiment, "--out", tmp_path / "pictures", *grid))
    result = {"model.json", "model.safetensors", "MODEL_CARD.md", "receipt.json", "report.html"}
    figures = {"events.jsonl", "rounds.jsonl", "summary.json", "audit.head"}
    readable = {name for name in readable_by_others(tmp_path / "shown") if not name.startswith("tensorboard/")}
    assert readable == result | figures
    for name in ("samples.json", "report.html"):
        assert stat.S_IMODE((tmp_path / "pictures" / name).stat().st_mode) == 0o600
    sites = {path.relative_to(tmp_path / "shown" / "sites").parts[1] for path in files_of(tmp_path / "shown" / "sites")}
    assert sites == {"alone", "memory"}


@pytest.mark.usefixtures("lax_umask")
def test_predictions_name_files_for_their_owner_only_and_figures_and_models_are_for_all(
    experiment: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    succeeded(flwr_sim("run", experiment, "--out", tmp_path / "run", *settings("evaluation.compare_local=false")))
    (images,) = list(exported(experiment, tmp_path / "data")[0].glob("*.npz"))
    succeeded(flwr_sim("predict", tmp_path / "run", images, "--out", made / "predictions.csv"))
    succeeded(flwr_sim("evaluate", tmp_path / "run", experiment, "--out", made / "figures.csv"))
    succeeded(flwr_sim("export", tmp_path / "run", "--to", "torchscript", "--out", made / "model.pt"))
    assert stat.S_IMODE((made / "predictions.csv").stat().st_mode) == 0o600
    assert readable_by_others(made) == {"figures.csv", "model.pt", "MODEL_CARD.md"}
