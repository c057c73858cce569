"""A whole study as its people type it, over real processes: from the words for the findings to the record.

Three hospitals label three findings of drawn digits: each labels two, north in a word of its own. At south a person
approves what is asked. The steps follow one another; each asserts what the person who takes it relies on.
"""

import csv
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from polyclinic.client.site.settings import load_site, read_site_settings
from polyclinic.data.base.image_set import ImageSet
from tests.client.approvals import WEBER, Approver, add_approver, write_approvers
from tests.federations import INLINE_RUN, SMALL_RUN
from tests.network.federated import connected, sites_by_round
from tests.network.real import Coordinator, Site, eventually, flwr_client, flwr_server, flwr_sim, summary_of
from tests.server.commands import Ended

pytestmark = [pytest.mark.slow, pytest.mark.network]

HOSPITALS = ("east", "north", "south")
DIGITS_USED = 600
FINDINGS: dict[str, Callable[[int], bool]] = {
    "Large": lambda digit: digit > 4,
    "Odd": lambda digit: digit % 2 == 1,
    "Round": lambda digit: digit in (0, 6, 8, 9),
}
COLUMNS = {
    "east": {"Large": "Large", "Odd": "Odd"},
    "north": {"gross": "Large", "Round": "Round"},
    "south": {"Odd": "Odd", "Round": "Round"},
}
"""Hospital -> its word -> the finding."""
SITE = """name = "{name}"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
patient_column = "patient"
label_columns = {columns}
sex_column = "sex"
image_size = 16
opt_out = "cat opted-out.txt"

[policy]
evaluate = true
"""
TITLE, PURPOSE = "Digits of three hospitals", "Can one model read the digits of all hospitals?"
"""The name of the experiment's file is the title of its runs."""
SECOND = "Digits without north"
EXPERIMENT = f"""{SMALL_RUN.format(channels=1)}
[training]
batch_size = 32
lr = 0.01

[evaluation]
compare_local = true
""".replace("[run]", f'[run]\npurpose = "{PURPOSE}"')
VOCABULARY = """
[vocabulary.Large]
synonyms = ["gross"]
definition = "a digit above 4"
[vocabulary.Odd]
[vocabulary.Round]
"""
PUBLIC = f"""{INLINE_RUN}
[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
label_columns = ["Large", "Odd", "Round"]
image_size = 16

[partition]
kind = "class_lists"
[partition.lists]
somebody = ["Large", "Odd", "Round"]
else = ["Round", "Large", "Odd"]
"""
"""Data that are public, on which somebody trained a model before the study."""
QUESTION_TITLE = "Are there enough round digits?"
QUESTION = f"""title = "{QUESTION_TITLE}"
tables = ["class", "sex"]
deadline_s = 120.0
"""
LEAVER = "north"


def write_images(folder: Path, indices: range, columns: dict[str, str], site: str = "") -> None:
    """Write digits as pictures, and their table with two pictures of each patient."""
    digits = load_digits()
    (folder / "images").mkdir(parents=True)
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "patient", "sex", *columns])
        for place, index in enumerate(indices):
            Image.fromarray((digits.images[index] * 15).astype(np.uint8)).save(folder / "images" / f"{index}.png")
            shown = [int(FINDINGS[finding](int(digits.target[index]))) for finding in columns.values()]
            writer.writerow([f"{index}.png", f"P-{place // 2}", "fm"[place // 2 % 2], *shown])
    if site:
        text = SITE.format(name=site, columns=json.dumps(list(columns)))
        (folder / "site.toml").write_text(text, encoding="utf-8")
        (folder / "opted-out.txt").write_text("", encoding="utf-8")


def read_table(site: Site) -> list[dict[str, str]]:
    with (site.folder / "labels.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def list_patients(site: Site) -> dict[str, list[str]]:
    """The patients of each part that the site's next run would train on, evaluate and test."""
    loaded = load_site(read_site_settings(site.folder), lambda line: None)
    parts: dict[str, ImageSet] = {"train": loaded.train, "validation": loaded.validation, "test": loaded.test}
    return {name: [str(patient) for patient in part.patients] for name, part in parts.items()}


def flat(ended: Ended) -> str:
    """What a command printed, without line breaks."""
    return " ".join((ended.out + ended.err).split())


@dataclass
class Study:
    """The people's files and the running hospitals.

    Attributes:
        seconds: Step -> wall time in seconds.
    """

    folder: Path
    coordinator: Coordinator
    sites: dict[str, Site]
    weber: Approver
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def experiment(self) -> Path:
        return self.folder / f"{TITLE}.toml"

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - begin

    def approve(self, kind: str) -> str:
        """Approve the text that came to south last; return its hash."""
        south = self.sites["south"].folder
        last = json.loads(flwr_client("plans", "list", south, "--json").out)[-1]
        assert (last["kind"], last["is_approved"]) == (kind, False)
        sha256 = str(last["sha256"])
        assert self.weber.approve(south, sha256[:12]).code == 0
        return sha256

    def train(self, name: str, *hospitals: str, overrides: Sequence[str] = ()) -> Path:
        """A run with these hospitals that ends well; return its folder."""
        out = self.folder / name
        run = self.coordinator.run(self.experiment, out, *overrides, sites=len(hospitals), pages=True)
        if overrides:  # another title is another plan
            run.says("south waits for approval at the hospital")
            self.approve("training")
        run.succeeds()
        assert sites_by_round(out) == [sorted(hospitals)] * 2
        return out


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Study]:
    data = []
    for place, name in enumerate(HOSPITALS):
        write_images(tmp_path / "data" / name, range(place, DIGITS_USED, 3), COLUMNS[name], name)
        data.append(tmp_path / "data" / name)
    weber = add_approver(tmp_path)
    south = data[-1] / "site.toml"
    south.write_text(f'{south.read_text()}approval = "required"\n')
    write_approvers(south, weber)
    experiment = tmp_path / f"{TITLE}.toml"
    experiment.write_text(EXPERIMENT, encoding="utf-8")
    with connected(experiment, tmp_path / "machine", data=data) as (coordinator, sites):
        yield Study(tmp_path, coordinator, {site.name: site for site in sites}, weber)


def test_a_whole_study(study: Study) -> None:
    with study.step("words"):
        agree_on_words(study)
    with study.step("count"):
        count_patients(study)
    with study.step("evaluate"):
        evaluate_an_existing_model(study)
    with study.step("evaluate at all"):
        ask_all_for_the_figures_of_the_model(study)
    with study.step("first run"):
        first = study.train("first", *HOSPITALS)  # begins at once, because its plan is approved
    with study.step("opt-out"):
        let_a_patient_opt_out(study)
    with study.step("leave"):
        let_a_hospital_leave(study, first)
    with study.step("second run"):
        second = study.train("second", "east", "south", overrides=[f'run.name="{SECOND}"'])
        check_second_run(study, first, second)
    with study.step("hand out"):
        hand_out(study, second)
    with study.step("record"):
        read_records(study)
    print({step: round(seconds, 1) for step, seconds in study.seconds.items()})  # shown by pytest -s


def agree_on_words(study: Study) -> None:
    """North's word belongs to no class until the vocabulary has it. Then all agree, and south approves the plan."""
    asking = ("status", study.coordinator.folder, "--contract", study.experiment, "--json")
    before = json.loads(flwr_server(*asking).out)
    assert "gross" in str(before["question"])
    study.experiment.write_text(EXPERIMENT + VOCABULARY, encoding="utf-8")
    for site in study.sites.values():
        checked = flwr_client("check", site.folder, "--experiment", study.experiment, "--offline")
        assert checked.code == 0, checked.out
        assert PURPOSE in flat(checked)
        assert ("gross as Large" in flat(checked)) == (site.name == "north")
    assert "waiting for approval" in json.loads(flwr_server(*asking).out)["silent"]["south"]
    south = study.sites["south"].folder
    shown = flwr_client("plans", "show", south, study.approve("training"))
    for words in (TITLE, PURPOSE, "Leaves in each round", "Odd", "Round", f"approved by {WEBER}"):
        assert words in shown.out
    eventually(lambda: json.loads(flwr_server(*asking).out)["agreed"], "all hospitals agree")


def count_patients(study: Study) -> None:
    """The first question waits at south; the second answer has the true counts of all."""
    question = study.folder / "question.toml"
    question.write_text(QUESTION + VOCABULARY.partition("definition")[0], encoding="utf-8")
    ended = flwr_server("count", study.coordinator.folder, question, "--out", study.folder / "counts-early")
    assert ended.code == 1
    assert "south" in ended.out
    assert "waiting for approval at the hospital" in flat(ended)
    assert not study.sites["south"].folder.joinpath("state", "counts").exists()
    study.approve("count")
    counts = study.folder / "counts"
    ended = flwr_server("count", study.coordinator.folder, question, "--out", counts)
    assert ended.code == 0, ended.out + ended.err
    lines = json.loads((counts / "counts.json").read_text(encoding="utf-8"))["counts"]
    shown = {line["class"]: line["all"] for line in lines if line["table"] == "class" and line["state"] == "present"}
    for finding in FINDINGS:
        rows = [
            (name, row)
            for name, columns in COLUMNS.items()
            for row in read_table(study.sites[name])
            for word, meant in columns.items()
            if meant == finding and row[word] == "1"
        ]
        patients = len({(name, row["patient"]) for name, row in rows})
        assert (shown[finding]["patients"], shown[finding]["images"]) == (patients, len(rows))
    assert (counts / "counts.html").is_file()


def evaluate_an_existing_model(study: Study) -> None:
    """A model of public data is scored at north on north's own test part, and nothing leaves."""
    public, model = study.folder / "public", study.folder / "existing"
    write_images(public, range(DIGITS_USED, 900), {name: name for name in FINDINGS})
    (public / "public.toml").write_text(PUBLIC + VOCABULARY, encoding="utf-8")
    trained = flwr_sim("run", public / "public.toml", "--out", model)
    assert trained.code == 0, trained.err
    north = study.sites["north"].folder
    before = (north / "state" / "audit.jsonl").read_bytes()
    ended = flwr_client("evaluate", north, model, "--by", "sex", "--failures", 4, "--out", study.folder / "at-north")
    assert ended.code == 0, ended.err
    scored = json.loads((study.folder / "at-north" / "evaluation.json").read_text(encoding="utf-8"))
    assert {row["class"] for row in scored["figures"]} == {"Large", "Round"}
    assert scored["data"][0]["images"] == len(list_patients(study.sites["north"])["test"])
    assert (study.folder / "at-north" / "failures.html").read_text(encoding="utf-8").count("<img ") == 2 * 2 * 4
    assert (north / "state" / "audit.jsonl").read_bytes() == before


def ask_all_for_the_figures_of_the_model(study: Study) -> None:
    """South's figures wait for an approval. Then all three are there, north's as it computed them itself."""
    asking = ("evaluate", study.coordinator.folder, study.folder / "existing", "--title", "Is it good?")
    ended = flwr_server(*asking, "--out", study.folder / "figures-early")
    assert ended.code == 1
    assert "south did not answer: waiting for approval at the hospital" in flat(ended)
    study.approve("evaluation")
    ended = flwr_server(*asking, "--out", study.folder / "figures")
    assert ended.code == 0, ended.out + ended.err
    scored = json.loads((study.folder / "figures" / "evaluation.json").read_text(encoding="utf-8"))
    assert [data["name"] for data in scored["data"]] == sorted(HOSPITALS)
    own = json.loads((study.folder / "at-north" / "evaluation.json").read_text(encoding="utf-8"))
    of_own = {row["class"]: row["auroc"] for row in own["figures"] if not row.get("group")}
    at_north = {row["class"]: row["auroc"] for row in scored["figures"] if row["data"] == "north"}
    assert at_north == pytest.approx(of_own, abs=1e-6)
    assert at_north.keys() == {"Large", "Round"}


def let_a_patient_opt_out(study: Study) -> None:
    """A patient of east, of whom the first run had two training images, is in no part from then on."""
    east = study.sites["east"]
    patient = list_patients(east)["train"][0]
    (east.folder / "opted-out.txt").write_text(f"{patient}\n", encoding="utf-8")
    remaining = [each for part in list_patients(east).values() for each in part]
    assert patient not in remaining
    assert len(remaining) == len(read_table(east)) - 2


def let_a_hospital_leave(study: Study, first: Path) -> None:
    """North leaves with a signed statement; the coordinator sees which model holds something of it."""
    north, coordinator = study.sites[LEAVER], study.coordinator
    north.end()
    left = flwr_client("withdraw", north.folder, "--reason", "contract ended", "--delete", "--yes")
    assert left.code == 0, left.err
    assert TITLE in left.out
    assert flwr_client("start", north.folder).code == 2
    statement = ("--withdrawal", north.folder / f"{LEAVER}.withdrawal")
    removed = flwr_server("remove", coordinator.folder, LEAVER, *statement, "--yes", "--json")
    assert removed.code == 0, removed.err
    (run,) = json.loads(removed.out)["affected"]
    assert (Path(run["folder"]), run["rounds"]) == (first, [1, 2])
    assert run["model_sha256"] == summary_of(first)["model_sha256"]
    assert flwr_client("audit", "verify", north.folder, "--receipt", first / "receipt.json").code == 0


def check_second_run(study: Study, first: Path, second: Path) -> None:
    """The second model has nothing of north, and no image of the patient who opted out."""
    assert set(summary_of(second)["sites"]) == {"east", "south"}
    images = [summary_of(out)["sites"]["east"]["train_samples"] for out in (first, second)]
    assert images[1] == images[0] - 2
    assert summary_of(second)["model_sha256"] != summary_of(first)["model_sha256"]
    assert flwr_server("verify", second / "receipt.json").code == 0
    pooled = summary_of(second)["test"]["pooled"]["per_class"]["Odd"]["decisions"]
    of_sites = [site["decisions"]["Odd"]["decisions"] for site in summary_of(second)["per_site"].values()]
    assert len(of_sites) == 2
    assert {name: sum(counts[name] for counts in of_sites) for name in pooled} == pooled
    for name in ("report.html", "MODEL_CARD.md"):
        text = (second / name).read_text(encoding="utf-8")
        assert SECOND in text
        assert f"Purpose: {PURPOSE}" in text


def hand_out(study: Study, second: Path) -> None:
    """East receives over the connection, south by hand; both verify it and read pictures with it."""
    packages = study.folder / "packages"
    sent = flwr_server("deliver", study.coordinator.folder, second, "--out", packages, "--send")
    assert sent.code == 0, sent.out + sent.err
    assert sorted(path.name for path in packages.iterdir()) == ["east.delivery", "south.delivery"]
    run = json.loads((second / "receipt.json").read_text(encoding="utf-8"))["run"]
    probabilities = set()
    for name in ("east", "south"):
        site = study.sites[name].folder
        received = flwr_client("receive", site, packages / f"{name}.delivery")
        assert received.code == 0, received.err
        assert SECOND in received.out
        (stored,) = json.loads(flwr_client("delivered", site, "--json").out)
        assert stored["fault"] == ""
        pictures = study.folder / "public" / "images"
        ended = flwr_client("predict", site, run[:8], pictures, "--out", study.folder / f"predictions-{name}")
        assert ended.code == 0, ended.err
        probabilities.add((study.folder / f"predictions-{name}" / "predictions.csv").read_bytes())
    assert len(probabilities) == 1
    # As the report says: what the coordinator cannot know, the hospital learns from the model that it received.
    east = study.sites["east"].folder
    scored = flwr_client("evaluate", east, east / "state" / "delivered" / run, "--by", "sex", "--json")
    assert scored.code == 0, scored.err
    assert {row["group"] for row in json.loads(scored.out)["figures"] if row.get("column") == "sex"} == {"f", "m"}


def read_records(study: Study) -> None:
    """Each hospital's record names all that was asked of it, and at south who approved it."""
    asked = {name: read_record(study.sites[name]) for name in HOSPITALS}
    titles = {name: {run["title"] for run in runs if run["kind"] == "training"} for name, runs in asked.items()}
    assert titles == {"east": {TITLE, SECOND}, "north": {TITLE}, "south": {TITLE, SECOND}}
    for name, runs in asked.items():
        assert [run["title"] for run in runs if run["kind"] == "count"] == [QUESTION_TITLE] * 2  # south refused one
        delivered = [(run["title"], run["coordinator"]) for run in runs if run["kind"] == "delivery"]
        assert delivered == ([] if name == LEAVER else [(SECOND, "trial")])
        for run in runs:
            if run["kind"] == "training":
                assert (run["purpose"], run["coordinator"], run["rounds"]) == (PURPOSE, "trial", [1, 2])
    approved = [
        run for run in asked["south"] if run["kind"] in ("training", "count") and run["left"].keys() - {"Error"}
    ]
    assert [[approval["approver"] for approval in run["approvals"]] for run in approved] == [[WEBER]] * 3
    last = [run for run in asked["east"] if run["kind"] == "training"][-1]
    assert last["patients_opted_out"] == 1
    assert "This hospital left its federation" in flat(flwr_client("record", study.sites[LEAVER].folder))
    table = flwr_client("record", study.sites["south"].folder, "--csv", study.folder / "south.csv").out
    for words in (TITLE, SECOND, PURPOSE, QUESTION_TITLE, WEBER, "A model lies here"):
        assert words in table
    with (study.folder / "south.csv").open(encoding="utf-8", newline="") as file:
        assert {TITLE, SECOND, QUESTION_TITLE} <= {row["title"] for row in csv.DictReader(file)}


def read_record(site: Site) -> list[dict[str, Any]]:
    ended = flwr_client("record", site.folder, "--json")
    assert ended.code == 0, ended.err
    return list(json.loads(ended.out)["runs"])
