"""Bad input: a clear error before any training, all faults at once, exit code 2, nothing written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.federations import DIGITS as SMALL
from tests.server.commands import Ended, flwr_sim

DIGITS_TABLE = 'kind = "digits"\nimage_size = 16'
PIXELS = np.random.default_rng(5).integers(0, 256, (40, 16, 16), dtype=np.uint8)


def refused(capsys: pytest.CaptureFixture[str], folder: Path, text: str, *more: str) -> Ended:
    """Run an experiment file of this text; it must end with 2 and leave no run folder."""
    (folder / "bad.toml").write_text(text, encoding="utf-8")
    ended = flwr_sim(capsys, "run", folder / "bad.toml", "--out", folder / "run", *more)
    assert ended.code == 2, ended
    assert not (folder / "run").exists()
    return ended


def test_an_unknown_key_is_named_with_the_nearest_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ended = refused(capsys, tmp_path, SMALL.replace("rounds = 2", "round = 2"))
    assert 'bad.toml: run.round: is not a known key. Did you mean "rounds"?' in ended.err


def test_all_faults_come_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = SMALL.replace("rounds = 2", "rounds = 0").replace("batch_size = 64", 'batch_size = "many"')
    text = text.replace("sites", "site")
    ended = refused(capsys, tmp_path, text)
    for key in ("run.rounds", "training.batch_size", "partition.site"):
        assert f"bad.toml: {key}" in ended.err


def test_unknown_method_wrong_parameter_and_missing_file_come_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = SMALL.replace('"surgical"', '"surgicl"').replace(DIGITS_TABLE, 'kind = "npz"\npath = "no.npz"')
    ended = refused(capsys, tmp_path, text)
    assert 'bad.toml: run.method: "surgicl" is not a method. Did you mean "surgical"?' in ended.err
    assert "no.npz" in ended.err


def test_a_missing_experiment_is_named_with_the_nearest_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "chest.toml").write_text(SMALL, encoding="utf-8")
    ended = flwr_sim(capsys, "run", tmp_path / "chset.toml", "--out", tmp_path / "run")
    assert ended.code == 2
    assert 'there is no such file. Did you mean "chest.toml"?' in ended.err


def test_a_run_folder_that_is_not_empty_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(SMALL, encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine", encoding="utf-8")
    ended = flwr_sim(capsys, "run", tmp_path / "good.toml", "--out", tmp_path / "run")
    assert ended.code == 2
    assert "is not empty, and nothing is written over." in ended.err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def npz_experiment(classes: str = '["a", "b"]') -> str:
    data = f'kind = "npz"\npath = "data.npz"\nclasses = {classes}'
    return SMALL.replace(DIGITS_TABLE, data).replace("sites = 3\nshared = 2", "sites = 2\nshared = 0")


def write_npz(path: Path, **changes: object) -> None:
    labels = (np.arange(40) % 2)[:, None].astype(np.uint8)
    arrays = {f"{part}_images": PIXELS for part in ("train", "val", "test")}
    arrays |= {f"{part}_labels": labels for part in ("train", "val", "test")}
    np.savez(path, **{name: array for name, array in (arrays | changes).items() if array is not None})  # type: ignore[arg-type]


def test_an_npz_with_the_wrong_keys_says_which_it_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", pictures=PIXELS, classes=np.zeros(40))
    ended = refused(capsys, tmp_path, npz_experiment())
    assert "bad.toml: data.path" in ended.err
    assert '"pictures"' in ended.err
    assert "train_images" in ended.err


def test_a_class_that_no_site_owns_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_npz(tmp_path / "data.npz")
    lists = 'kind = "class_lists"\n[partition.lists]\nnorth = ["a"]\nsouth = ["a"]'
    text = npz_experiment().replace('kind = "class_subsets"\nsites = 2\nshared = 0', lists)
    ended = refused(capsys, tmp_path, text)
    assert "bad.toml: partition.lists" in ended.err
    assert '"b"' in ended.err


def test_a_class_that_the_data_do_not_have_is_named_with_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_npz(tmp_path / "data.npz")
    lists = 'kind = "class_lists"\n[partition.lists]\nnorth = ["Nodule"]\nsouth = ["Massa"]'
    text = npz_experiment('["Nodule", "Mass"]').replace('kind = "class_subsets"\nsites = 2\nshared = 0', lists)
    ended = refused(capsys, tmp_path, text)
    assert '"Massa"' in ended.err
    assert 'Did you mean "Mass"?' in ended.err


def test_a_patient_in_two_splits_stops_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = {f"{part}_patient": np.array([f"{part}{row}" for row in range(40)]) for part in ("train", "val", "test")}
    own["test_patient"][7] = "train3"
    write_npz(tmp_path / "data.npz", **own)
    ended = refused(capsys, tmp_path, npz_experiment().replace('kind = "npz"', 'kind = "npz"\npatient_key = "patient"'))
    assert "train3" in ended.err


def test_a_weights_file_with_another_hash_gives_both(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"not what was announced")
    weights = f'channels = 1\nweights = "weights.safetensors"\nweights_sha256 = "{"0" * 64}"'
    ended = refused(capsys, tmp_path, SMALL.replace("channels = 1", weights))
    assert "model.weights" in ended.err
    assert "0" * 64 in ended.err


def folder_experiment(folder: Path, corrupt: int) -> str:
    """A csv with 60 pictures, some of which are no pictures."""
    (folder / "pictures").mkdir()
    lines = ["image,patient,Nodule,Infiltration"]
    for row in range(60):
        path = folder / "pictures" / f"{row:02d}.png"
        Image.fromarray(PIXELS[row % 40]).save(path)
        lines.append(f"{path.name},p{row},{row % 2},{row % 3 % 2}")
    for row in range(corrupt):
        (folder / "pictures" / f"{row:02d}.png").write_bytes(b"\x89PNG cut off")
    (folder / "labels.csv").write_text("\n".join(lines), encoding="utf-8")
    data = (
        'kind = "folder"\nimages = "pictures"\nlabels = "labels.csv"\nimage_column = "image"\n'
        'patient_column = "patient"\nlabel_columns = ["Nodule", "Infiltration"]\nimage_size = 16'
    )
    small = SMALL.replace(DIGITS_TABLE, data)
    return small.replace("sites = 3\nshared = 2", "sites = 2\nshared = 1")


def test_a_label_column_that_is_not_there_is_named_with_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = folder_experiment(tmp_path, corrupt=0).replace('"Infiltration"]', '"Infiltrate"]')
    ended = refused(capsys, tmp_path, text)
    assert '"Infiltrate" is not a column of labels.csv' in ended.err
    assert 'Did you mean "Infiltration"?' in ended.err


def test_a_few_corrupt_images_are_skipped_counted_and_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "good.toml").write_text(folder_experiment(tmp_path, corrupt=2), encoding="utf-8")
    ended = flwr_sim(capsys, "run", tmp_path / "good.toml", "--out", tmp_path / "run")
    events = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    assert ended.code == 0
    assert events.count('"image_skipped"') == 2
    assert "00.png" in events


def test_too_many_corrupt_images_stop_the_run_with_their_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ended = refused(capsys, tmp_path, folder_experiment(tmp_path, corrupt=7))
    assert "00.png" in ended.err
    assert "06.png" in ended.err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.lr=inf", "training.lr: Input should be a finite number; got Infinity."),
        ("training.lr=nan", "training.lr: Input should be "),
        ("run.seed=99999999999999999999", "run.seed: Input should be less than 9223372036854775808"),
        ("data.split_seed=-1", "data.split_seed: Input should be greater than or equal to 0; got -1."),
        ("participation.min_sites=5", "participation.min_sites: is 5, but the partition makes 3 sites."),
        ("participation.sites_per_round=4", "participation.sites_per_round: is 4, but the partition makes 3 sites."),
        ('partition={kind = "class_lists", lists = {"../away" = ["0"]}}', "partition.lists"),
    ],
)
def test_numbers_and_names_that_cannot_be_are_refused_before_training(
    override: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert said in refused(capsys, tmp_path, SMALL, "--set", override).err


def test_a_site_name_that_leads_out_of_the_run_folder_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = ", ".join(f'"{digit}"' for digit in range(10))
    partition = f'partition={{kind = "class_lists", lists = {{"../away" = [{names}]}}}}'
    ended = refused(capsys, tmp_path, SMALL, "--set", partition)
    assert 'site name: "../away" cannot name a folder.' in ended.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_share_of_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ended = refused(capsys, tmp_path, SMALL, "--set", "simulation.gpus_per_site=0.5")
    assert "simulation.gpus_per_site: is 0.5, but this machine shows no GPU." in ended.err


def test_an_override_that_is_no_assignment_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ended = refused(capsys, tmp_path, SMALL, "--set", "run.rounds")
    assert "--set run.rounds: must be section.key=value, for instance run.rounds=3." in ended.err
