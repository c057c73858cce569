"""Over the network: a finished run is handed out, sent and by hand, and each hospital verifies what it received."""

import csv
import json
import math
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyclinic.common.security.delivery import (
    MANIFEST_FILE,
    MODEL_CARD_FILE,
    PACKAGE_FILES,
    REPORT_FILE,
    SIGNATURE_FILE,
    THRESHOLDS_FILE,
)
from polyclinic.server.delivery.own_report import REPLY_DESCRIPTIONS
from tests.network.federated import Federation, admitted
from tests.network.real import FULL, flwr_client, flwr_server, flwr_sim, lines_of, summary_of
from tests.server.reports import body_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Three hospitals, and a run of two rounds that was handed out as files and over the connections."""
    with admitted(tmp_path_factory.mktemp("delivery"), FULL) as federation:
        federation.coordinator.start()
        federation.gather()
        settings = ("run.rounds=2", "run.name=first study", "evaluation.compare_local=true")
        federation.run(*settings, once=True).succeeds()
        out = federation.folder / "packages"
        ended = flwr_server("deliver", federation.coordinator.folder, federation.out, "--out", out, "--send")
        assert ended.code == 0, ended.out + ended.err
        yield federation


def run_name(federation: Federation) -> str:
    return str(json.loads((federation.out / "receipt.json").read_text())["run"])


def test_each_connected_hospital_stores_its_own_package(handed_out: Federation) -> None:
    for site in handed_out.sites:
        folder = site.folder / "state" / "delivered" / run_name(handed_out)
        assert {path.name for path in folder.iterdir()} == {*PACKAGE_FILES, MANIFEST_FILE, SIGNATURE_FILE}
        assert (folder / "model.safetensors").read_bytes() == (handed_out.out / "model.safetensors").read_bytes()
        assert (folder / "receipt.json").read_bytes() == (handed_out.out / "receipt.json").read_bytes()
        points = summary_of(handed_out.out)["test"]["operating_points"]
        kept = ("rule", "target", "threshold")
        chosen = {name: [{key: point[key] for key in kept} for point in each] for name, each in points.items()}
        assert json.loads((folder / THRESHOLDS_FILE).read_text()) == {"test": {"operating_points": chosen}}
        assert chosen
        manifest = json.loads((folder / MANIFEST_FILE).read_text())
        assert (manifest["site"], manifest["name"], manifest["coordinator"]) == (site.name, "first study", "trial")
        assert manifest["model_sha256"] == summary_of(handed_out.out)["model_sha256"]
        assert folder.stat().st_mode & 0o077 == 0


def test_the_report_of_a_hospital_has_its_own_figures_and_no_others(handed_out: Federation) -> None:
    folder = handed_out.north.folder / "state" / "delivered" / run_name(handed_out)
    text = body_text((folder / REPORT_FILE).read_text())
    benefit = summary_of(handed_out.out)["benefit"]["north"]["benefit"]
    assert f"{benefit['mean']['federated']['value']:.3f}" in text
    for name in benefit["auroc"]["alone"]:
        assert f"{benefit['auroc']['alone'][name]:.3f}" in text
        assert f"{benefit['auroc']['federated'][name]:.3f}" in text
    assert "It trained in rounds 1 to 2 of 2 rounds" in text
    assert f"a probability for each of these findings: {', '.join(summary_of(handed_out.out)['classes'])}." in text
    assert "east" not in text
    assert "south" not in text
    sent = [
        line for line in lines_of(handed_out.north.folder / "state" / "audit.jsonl") if line.get("direction") == "out"
    ]
    assert {name for name in REPLY_DESCRIPTIONS if name in text} == {
        line["record"] for line in sent if line["record"] in REPLY_DESCRIPTIONS
    }


def test_a_package_is_a_line_of_the_hospitals_audit_in_both_directions(handed_out: Federation) -> None:
    entries = lines_of(handed_out.north.folder / "state" / "audit.jsonl")
    lines = [line for line in entries if str(line.get("run", "")).startswith("delivery-")]
    received, stored, acknowledged = lines
    assert [(line["direction"], line["record"], line["decision"]) for line in (received, acknowledged)] == [
        ("in", "DeliveryRequest", "allow"),
        ("out", "RefusalNoted", "allow"),
    ]
    model = {"run": run_name(handed_out), "sha256": summary_of(handed_out.out)["model_sha256"]}
    assert (stored["event"], stored["name"], stored["coordinator"]) == ("delivered", "first study", "trial")
    assert stored["model"] == model
    assert flwr_client("audit", "verify", handed_out.north.folder).code == 0


def test_a_package_by_hand_is_stored_as_one_that_was_sent(handed_out: Federation) -> None:
    site, package = handed_out.north, handed_out.folder / "packages" / "north.delivery"
    stored = site.folder / "state" / "delivered" / run_name(handed_out)
    sent = {path.name: path.read_bytes() for path in stored.iterdir()}
    shutil.rmtree(stored)
    ended = flwr_client("receive", site.folder, package)
    assert ended.code == 0, ended.err
    assert "From the coordinator trial" in ended.out
    assert "first study" in ended.out
    assert {path.name: path.read_bytes() for path in stored.iterdir()} == sent


def test_another_hospitals_package_is_refused(handed_out: Federation) -> None:
    ended = flwr_client("receive", handed_out.north.folder, handed_out.folder / "packages" / "south.delivery")
    assert ended.code == 2
    words = " ".join(ended.err.split())
    assert 'it is for the site "south", and this site is "north"' in words
    assert "north.delivery" in words  # what to ask for; the package itself is whole


@pytest.mark.parametrize("name", [*PACKAGE_FILES, MANIFEST_FILE, SIGNATURE_FILE])
def test_a_changed_byte_of_any_file_is_refused(handed_out: Federation, tmp_path: Path, name: str) -> None:
    changed = tmp_path / "north.delivery"
    with zipfile.ZipFile(handed_out.folder / "packages" / "north.delivery") as original:
        contents = {entry: original.read(entry) for entry in original.namelist()}
    middle = len(contents[name]) // 2
    contents[name] = contents[name][:middle] + bytes([contents[name][middle] ^ 1]) + contents[name][middle + 1 :]
    with zipfile.ZipFile(changed, "w") as archive:
        for entry, content in contents.items():
            archive.writestr(entry, content)
    ended = flwr_client("receive", handed_out.north.folder, changed)
    assert ended.code == 2
    assert "is not stored" in ended.err


def test_a_hospital_evaluates_a_received_model_by_the_first_digits_of_its_run(
    handed_out: Federation, tmp_path: Path
) -> None:
    site, run = handed_out.north, run_name(handed_out)
    folder = site.folder / "state" / "delivered" / run
    by_digits = flwr_client("evaluate", site.folder, run[:8], "--out", tmp_path / "digits")
    assert by_digits.code == 0, by_digits.err
    assert flwr_client("evaluate", site.folder, folder, "--out", tmp_path / "folder").code == 0
    first, second = ((tmp_path / name / "figures.csv").read_bytes() for name in ("digits", "folder"))
    assert first == second
    assert flwr_client("evaluate", site.folder, "no-such-run").code == 2


def test_a_package_of_an_unknown_authority_is_refused(handed_out: Federation, tmp_path: Path) -> None:
    # Another coordinator of the same name admits the same hospital, and signs the run's model.
    other = tmp_path / "trial"
    request = handed_out.north.folder / "north.request"
    assert flwr_server("init", other, "--name", "trial", "--host", "127.0.0.1").code == 0
    assert flwr_server("admit", other, request, "--yes").code == 0
    ended = flwr_server("deliver", other, handed_out.out, "--out", tmp_path / "packages")
    assert ended.code == 1
    assert "this coordinator has not admitted it" in ended.out  # east and south
    refused = flwr_client("receive", handed_out.north.folder, tmp_path / "packages" / "north.delivery")
    assert refused.code == 2
    assert "another authority signed it" in " ".join(refused.err.split())


def test_a_stored_model_that_was_changed_is_listed_as_such(handed_out: Federation) -> None:
    site = handed_out.east
    assert json.loads(flwr_client("delivered", site.folder, "--json").out)[0]["fault"] == ""
    card = site.folder / "state" / "delivered" / run_name(handed_out) / MODEL_CARD_FILE
    whole = card.read_bytes()
    card.write_bytes(whole + b"This model is a medical device.\n")
    ended = flwr_client("delivered", site.folder)
    assert ended.code == 1
    assert "MODEL_CARD.md was changed" in " ".join(ended.out.split())
    card.write_bytes(whole)
    assert flwr_client("delivered", site.folder).code == 0


def test_a_changed_model_is_not_signed(handed_out: Federation, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(handed_out.out, run)
    tensors = bytearray((run / "model.safetensors").read_bytes())
    tensors[-1] ^= 1
    (run / "model.safetensors").write_bytes(tensors)
    ended = flwr_server("deliver", handed_out.coordinator.folder, run, "--out", tmp_path / "packages")
    assert ended.code == 2
    assert "Nothing was signed" in ended.err
    assert not (tmp_path / "packages").exists()


def test_a_hospital_that_is_down_is_named_and_its_package_still_lies_in_the_folder(
    handed_out: Federation, tmp_path: Path
) -> None:
    handed_out.stop(handed_out.south)
    out = tmp_path / "packages"
    ended = flwr_server("deliver", handed_out.coordinator.folder, handed_out.out, "--out", out, "--send")
    handed_out.gather()
    assert ended.code == 1
    assert "south has no package: " in ended.out
    assert "north has stored its package." in ended.out
    assert (out / "south.delivery").is_file()


# ---------------------------------------------------------------------- use at the hospital


def write_pictures(federation: Federation, folder: Path, count: int = 3) -> Path:
    """Pictures of digits, as PNG files, and one file that is none."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir()
    for row, image in enumerate(load_digits().images[:count]):
        Image.fromarray((image * 15).astype("uint8")).save(folder / f"{row}.png")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_delivered_model_gives_the_probabilities_that_the_coordinator_would_compute(
    handed_out: Federation, tmp_path: Path
) -> None:
    images = write_pictures(handed_out, tmp_path / "images")
    ended = flwr_client("predict", handed_out.north.folder, run_name(handed_out)[:8], images, "--out", tmp_path / "out")
    assert ended.code == 1, ended.err  # one picture is broken
    assert "broken.png" in ended.out
    theirs = flwr_sim("predict", handed_out.out, images, "--out", tmp_path / "sim.csv")
    assert theirs.code in (0, 1), theirs.err
    assert (tmp_path / "out" / "predictions.csv").read_bytes() == (tmp_path / "sim.csv").read_bytes()
    content = json.loads((tmp_path / "out" / "predictions.json").read_text())
    rows = {row["image"]: row for row in read_rows(tmp_path / "out" / "predictions.csv") if not row["unreadable"]}
    assert content["images"].keys() == rows.keys() == {"0.png", "1.png", "2.png"}
    for name, values in content["images"].items():
        assert values == {label: pytest.approx(float(rows[name][label]), abs=1e-6) for label in values}
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0


def test_recalibrated_probabilities_are_those_of_the_stored_fit(handed_out: Federation, tmp_path: Path) -> None:
    site, run = handed_out.north, run_name(handed_out)
    images = write_pictures(handed_out, tmp_path / "images")
    missing = flwr_client("predict", site.folder, run, images, "--out", tmp_path / "none", "--calibrated")
    assert missing.code == 2
    assert "flwr-client recalibrate" in missing.err
    ended = flwr_client("recalibrate", site.folder, run, "--json")
    assert ended.code == 0, ended.err
    fits = json.loads(ended.out)["classes"]
    stored = json.loads((site.folder / "state" / "delivered" / run / "calibration.json").read_text())
    assert stored["classes"] == fits
    for options in ([], ["--calibrated"]):
        flwr_client("predict", site.folder, run, images, "--out", tmp_path / f"out{len(options)}", *options)
    plain, fitted = (json.loads((tmp_path / f"out{n}" / "predictions.json").read_text()) for n in (0, 1))
    assert fitted["calibrated"] == [name for name, fit in fits.items() if not fit["reason"]]
    for name, values in plain["images"].items():
        for label, before in values.items():
            logit = math.log(before / (1 - before))
            expected = 1 / (1 + math.exp(-(fits[label]["slope"] * logit + fits[label]["offset"])))
            assert fitted["images"][name][label] == pytest.approx(expected, abs=1e-5)
    assert json.loads(flwr_client("delivered", site.folder, "--json").out)[0]["fault"] == ""  # it is beside the package


def test_a_model_that_is_not_there_is_named(handed_out: Federation, tmp_path: Path) -> None:
    images = write_pictures(handed_out, tmp_path / "images")
    ended = flwr_client("predict", handed_out.north.folder, "nothing", images, "--out", tmp_path / "out")
    assert ended.code == 2
    assert "flwr-client delivered" in ended.err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- a hospital leaves: these tests come last


def test_a_hospital_leaves_with_a_signed_statement_that_the_coordinator_verifies(
    handed_out: Federation, tmp_path: Path
) -> None:
    site, coordinator = handed_out.north, handed_out.coordinator
    running = flwr_client("withdraw", site.folder, "--yes")
    assert running.code == 2
    assert "another flwr-client runs on this folder" in running.err
    assert "What stays" not in running.out  # refused before anybody reads on and agrees
    handed_out.stop(site)
    (site.folder / "state" / "features").mkdir(exist_ok=True)
    (site.folder / "state" / "features" / "cache").write_bytes(b"features")
    ended = flwr_client("withdraw", site.folder, "--yes", "--delete", "--reason", "contract ended")
    assert ended.code == 0, ended.err
    assert "first study" in ended.out
    assert "2 rounds" in ended.out
    for name in ("features", "memory", "images-encrypted"):
        assert not (site.folder / "state" / name).exists()
    assert flwr_client("audit", "verify", site.folder).code == 0
    refused = flwr_client("start", site.folder)
    assert refused.code == 2
    assert "has left its federation" in refused.err
    assert "has left its federation" in flwr_client("status", site.folder).err
    statement = site.folder / "north.withdrawal"
    changed = tmp_path / "changed.withdrawal"
    changed.write_bytes(statement.read_bytes().replace(b"contract ended", b"contract  ended"))
    for file, name in ((changed, "north"), (statement, "east")):
        wrong = flwr_server("remove", coordinator.folder, name, "--withdrawal", file, "--yes")
        assert wrong.code == 2
        assert "Nothing was removed" in wrong.err
    removed = flwr_server("remove", coordinator.folder, "north", "--withdrawal", statement, "--yes")
    assert removed.code == 0, removed.err
    assert (coordinator.folder / "removed" / "north.withdrawal").read_bytes() == statement.read_bytes()
    record = json.loads((coordinator.folder / "removed" / "north.json").read_text())
    assert record["reason"] == "contract ended"
    signed = json.loads(json.loads(statement.read_text())["statement"])
    assert [(run["title"], run["rounds"]) for run in signed["runs"]] == [("first study", 2)]
    ended = flwr_server("deliver", coordinator.folder, handed_out.out, "--out", tmp_path / "packages")
    assert "north has no package: it is revoked" in ended.out


def test_a_hospital_that_left_comes_back_by_undo(handed_out: Federation) -> None:
    again = flwr_client("withdraw", handed_out.north.folder, "--yes")
    assert "has left before" in again.err
    assert flwr_client("withdraw", handed_out.north.folder, "--undo").code == 0
    assert not (handed_out.north.folder / "north.withdrawal").exists()
    assert "has left its federation" not in flwr_client("check", handed_out.north.folder, "--images", "1").err
    assert flwr_client("withdraw", handed_out.north.folder, "--undo").code == 2
