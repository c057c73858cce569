"""Sites that are broken on purpose, each in one way: the check's exit code names it, the remedy fixes it."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import client.check.connection
from client.check.findings import Result, Severity
from client.check.machine import Gpu
from client.connection.exit_codes import ExitCode
from common import __version__
from common.system.plain_text import is_plain
from common.wire.fleet_protocol import WIRE_VERSION
from server.coordinator.authority import issue_server_certificate
from server.deployment.superlink.fleet import hello
from tests.client.check.servers import (
    Inspector,
    coordinators,
    grpc_server,
    listening,
    says,
    shows,
    speaks_http,
    tls_of,
)
from tests.client.check.sites import GB, GOOD_MACHINE, SMALL_GPU, Hospital, hospital_in, write_images

DATA_ONLY = {"offline": True}


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return hospital_in(tmp_path / "north")


def the_finding(result: Result, code: ExitCode, severity: Severity = Severity.FAULT) -> str:
    """Problem and remedy of the gravest finding, which is of this kind."""
    assert result.most_severe is not None
    assert (result.exit_code, result.most_severe.severity) == (code, severity)
    return f"{result.most_severe.problem} {result.most_severe.remedy}"


# ---------------------------------------------------------------------- the connection


def test_a_certificate_for_another_host(hospital: Hospital) -> None:
    with listening(shows(*coordinators(hospital.coordinator)), "127.0.0.2") as port:
        said = the_finding(hospital.at(f"127.0.0.2:{port}").checked(), ExitCode.WRONG_HOST)
    assert "is not for 127.0.0.2. It is for fl.example, localhost, 127.0.0.1." in said
    assert "flwr-server init DIR --renew --host" in said


def test_an_expired_certificate(hospital: Hospital) -> None:
    issue_server_certificate(hospital.coordinator, days=-1)
    with listening(shows(*coordinators(hospital.coordinator))) as port:
        said = the_finding(hospital.at(f"127.0.0.1:{port}").checked(), ExitCode.EXPIRED)
    assert "has expired. It is valid from " in said
    assert "this machine's clock says " in said
    assert "flwr-server init DIR --renew" in said


def test_tls_that_a_proxy_opens(hospital: Hospital, tmp_path: Path) -> None:
    with listening(Inspector(tmp_path).handle) as port:
        proxied = {"https_proxy": f"http://127.0.0.1:{port}"}
        result = hospital.at("localhost:9092").checked(environment=proxied)
    said = the_finding(result, ExitCode.OTHER_AUTHORITY)
    assert 'shows a certificate issued by "ACME Web Gateway"' in said
    assert "TLS is opened on the way" in said
    assert "Have localhost, port 9092, exempted from TLS inspection." in said


def test_another_coordinator_is_not_taken_for_an_inspecting_proxy(hospital: Hospital, tmp_path: Path) -> None:
    stranger = hospital_in(tmp_path / "elsewhere" / "site").coordinator
    with listening(shows(*coordinators(stranger))) as port:
        said = the_finding(hospital.at(f"127.0.0.1:{port}").checked(), ExitCode.OTHER_AUTHORITY)
    assert "trial (Polyclinic authority)" in said
    assert "ask it for a new kit" in said
    assert "inspect" not in said


def test_a_port_that_speaks_plain_http(hospital: Hospital) -> None:
    with listening(speaks_http) as port:
        said = the_finding(hospital.at(f"127.0.0.1:{port}").checked(), ExitCode.NO_TLS)
    assert "does not speak TLS; this site talks to nobody without. It speaks plain HTTP." in said
    assert "Ask the coordinator which port flwr-server listens on" in said


def test_a_port_that_speaks_grpc_without_tls(hospital: Hospital) -> None:
    with grpc_server(says()) as port:
        said = the_finding(hospital.at(f"127.0.0.1:{port}").checked(), ExitCode.NO_TLS)
    assert "It speaks plain HTTP/2, as gRPC without TLS does." in said


def test_a_name_that_nobody_knows(hospital: Hospital) -> None:
    said = the_finding(hospital.at("fl.invalid:9092").checked(), ExitCode.HOST_UNKNOWN)
    assert said.startswith("the name fl.invalid cannot be resolved. Ask for a DNS entry")


def test_a_port_that_nobody_answers_at(hospital: Hospital) -> None:
    with listening(speaks_http) as port:
        pass
    said = the_finding(hospital.at(f"127.0.0.1:{port}").checked(), ExitCode.NO_ANSWER)
    assert "Connection refused" in said
    assert f"must allow outgoing TCP to 127.0.0.1, port {port}" in said


def test_a_proxy_in_capitals_only_is_said_not_to_be_used(hospital: Hospital) -> None:
    result = hospital.checked(environment={"HTTPS_PROXY": "http://proxy.example:3128"})
    (said,) = [finding for finding in result.areas[0].findings if finding.severity == Severity.NOTE]
    assert said.problem == "HTTPS_PROXY is set, but gRPC reads the lower-case name only: it is not used."
    assert said.remedy == "If the way leads through it, set https_proxy too."


# ---------------------------------------------------------------------- what the coordinator says

OURS = {"release": __version__, "wire": WIRE_VERSION, "key": "admitted"}


@pytest.mark.parametrize(("seconds", "words"), [(60.0, "ahead of"), (-900.0, "behind")])
def test_a_clock_that_is_wrong(hospital: Hospital, seconds: float, words: str) -> None:
    def answer(request: bytes) -> bytes:
        return says(time=time.time() - seconds, **OURS)(request)

    with grpc_server(answer, tls_of(hospital.coordinator)) as port:
        said = the_finding(hospital.at(f"127.0.0.1:{port}").checked(), ExitCode.CLOCK)
    assert f"s {words} the coordinator's" in said
    assert "NTP" in said


def of_release(hospital: Hospital, release: str, wire: int = WIRE_VERSION) -> Result:
    """The check against a coordinator of this release."""

    def answer(request: bytes) -> bytes:
        return json.dumps({"time": time.time(), "release": release, "wire": wire, "key": "admitted"}).encode()

    with grpc_server(answer, tls_of(hospital.coordinator)) as port:
        return hospital.at(f"127.0.0.1:{port}").checked()


def test_another_wire_version(hospital: Hospital) -> None:
    said = the_finding(of_release(hospital, "9.9.9", 99), ExitCode.VERSION)
    assert "the coordinator runs release 9.9.9 (wire 99), this site " in said
    assert "Install release 9.9.9 here" in said


def test_another_release_of_the_same_wire_version_is_no_fault_and_both_are_named(hospital: Hospital) -> None:
    result = of_release(hospital, "9.9.9")
    assert result.exit_code == 0
    assert any("9.9.9" in passed and __version__ in passed for passed in result.areas[0].passed)


def test_a_release_of_any_text_is_short_and_plain(hospital: Hospital) -> None:
    result = of_release(hospital, f"\x1b[2J\u202e{'9' * 5000}")
    (said,) = [passed for passed in result.areas[0].passed if "release" in passed]
    assert is_plain(said)
    assert len(said) < 200
    assert is_plain(str(result.areas[0].facts["release"]))


def test_a_wire_version_that_is_no_such_number_is_no_answer(hospital: Hospital) -> None:
    said = the_finding(of_release(hospital, "9.9.9", 10**4000), ExitCode.NO_ANSWER)
    assert len(said) < 500


def test_a_key_that_was_not_admitted(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.check.connection, "KEY_PATIENCE_S", 0.0)
    with grpc_server(hello.handler(lambda key: None), tls_of(hospital.coordinator)) as port:
        said = the_finding(hospital.at(f"127.0.0.1:{port}").checked(), ExitCode.KEY)
    assert "Ask the coordinator whether this site is admitted" in said


def test_an_admission_that_is_on_its_way_is_waited_for(hospital: Hospital) -> None:
    answers = iter([None])
    with grpc_server(hello.handler(lambda key: next(answers, 7)), tls_of(hospital.coordinator)) as port:
        assert hospital.at(f"127.0.0.1:{port}").checked().exit_code == 0


def test_an_admitted_site_that_lacks_nothing_has_exit_code_0(hospital: Hospital) -> None:
    with grpc_server(hello.handler(lambda key: 7), tls_of(hospital.coordinator)) as port:
        result = hospital.at(f"127.0.0.1:{port}").checked()
    assert [finding for area in result.areas for finding in area.findings if finding.severity] == []
    assert result.exit_code == 0
    connection = result.areas[0]
    assert "this site's key is admitted" in connection.passed
    assert abs(float(connection.facts["clock_ahead_s"])) < 1


# ---------------------------------------------------------------------- data


def test_a_label_column_that_is_not_there(hospital: Hospital) -> None:
    hospital.edit('"Effusion"', '"Efusion"')
    said = the_finding(hospital.checked(**DATA_ONLY), ExitCode.COLUMN)
    assert 'data.label_columns[1]: "Efusion" is not a column of labels.csv' in said
    assert 'Did you mean "Effusion"?' in said


def test_48_of_1910_images_that_are_empty_are_counted_and_named(tmp_path: Path) -> None:
    hospital = hospital_in(tmp_path / "north", images=1910, size=16)
    for row in range(0, 1910, 40):
        (hospital.folder / "images" / f"{row:05}.png").write_bytes(b"")
    result = hospital.checked(images=40, **DATA_ONLY)
    said = the_finding(result, ExitCode.EMPTY_FILES, Severity.WARNING)
    assert said.startswith("48 of 1,910 image files are empty (2.5%). Up to 5% of the images may be unreadable")
    assert "they are left out, the rest is used" in said
    assert result.most_severe is not None
    assert result.most_severe.names == tuple(f"{row:05}.png" for row in range(0, 1910, 40))


def test_more_empty_files_than_the_site_allows_end_it(hospital: Hospital) -> None:
    for row in range(6):
        (hospital.folder / "images" / f"{row:05}.png").write_bytes(b"")
    said = the_finding(hospital.checked(**DATA_ONLY), ExitCode.EMPTY_FILES)
    assert "6 of 60 image files are empty (10.0%)" in said
    assert "flwr-client start will end" in said


def test_files_that_cannot_be_decoded_are_named_with_the_reason(hospital: Hospital) -> None:
    (hospital.folder / "images" / "00003.png").write_bytes(b"\x89PNG\r\n\x1a\nand no more")
    (hospital.folder / "images" / "00004.png").write_text("<html>404</html>", encoding="utf-8")
    result = hospital.checked(**DATA_ONLY)
    said = the_finding(result, ExitCode.UNREADABLE, Severity.WARNING)
    assert "2 of 60 images that were tried cannot be read (3.3%)" in said
    assert result.most_severe is not None
    assert [name.split(":")[0] for name in result.most_severe.names] == ["00003.png", "00004.png"]
    assert result.most_severe.names[1] == "00004.png: neither PNG, JPEG, DICOM nor NIfTI"


def test_images_that_are_all_inverted(hospital: Hospital) -> None:
    for path in (hospital.folder / "images").iterdir():
        Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    said = the_finding(hospital.checked(**DATA_ONLY), ExitCode.INVERTED, Severity.WARNING)
    assert said.startswith("black and white look exchanged (nearly sure): in 60 of the 60 images that tell")
    assert "flwr-client preview-data" in said


def test_a_patient_on_two_sides_of_the_split(hospital: Hospital) -> None:
    rows = hospital.table
    first = rows[0]["patient"]
    for row in rows:
        row["part"] = "test" if row["patient"] != first else row["part"]
    rows[-1] |= {"patient": first, "part": "test"}
    hospital.rewrite(rows)
    said = the_finding(hospital.checked(**DATA_ONLY), ExitCode.PATIENTS)
    assert f'1 patient in both train and test: "{first}".' in said
    assert "Put all images of a patient on one side of the split." in said


def test_an_image_that_stands_in_train_and_in_test_under_two_names(hospital: Hospital) -> None:
    train, test = (next(row["image"] for row in hospital.table if row["part"] == part) for part in ("train", "test"))
    images = hospital.folder / "images"
    (images / test).write_bytes((images / train).read_bytes())
    result = hospital.checked(**DATA_ONLY)
    said = the_finding(result, ExitCode.DUPLICATES, Severity.WARNING)
    assert "1 image stands in two parts of the split under different names." in said
    assert result.most_severe is not None
    assert set(result.most_severe.names[0].split(" = ")) == {f"{train} (train)", f"{test} (test)"}


def test_a_class_that_the_data_does_not_have(hospital: Hospital) -> None:
    hospital.edit("image_size", 'annotates = ["Cardiomegali"]\nimage_size')
    said = the_finding(hospital.checked(**DATA_ONLY), ExitCode.COLUMN)
    assert 'data.annotates: "Cardiomegali" is not a class of the data.' in said
    assert 'Did you mean "Cardiomegaly"?' in said


def test_two_columns_that_mean_one_class(hospital: Hospital) -> None:
    toml = hospital.folder / "site.toml"
    toml.write_text(
        toml.read_text(encoding="utf-8") + '[data.synonyms]\n"Effusion" = "Cardiomegaly"\n', encoding="utf-8"
    )
    said = the_finding(hospital.checked(**DATA_ONLY), ExitCode.BAD_INPUT)
    assert "both mean" in said
    assert "Keep one of them" in said


def test_a_split_without_training_images(hospital: Hospital) -> None:
    hospital.rewrite([row | {"part": "test"} for row in hospital.table])
    assert "there is no training image" in the_finding(hospital.checked(**DATA_ONLY), ExitCode.BAD_INPUT)


# ---------------------------------------------------------------------- the machine


def test_a_disk_that_is_nearly_full(hospital: Hospital) -> None:
    said = the_finding(hospital.checked(replace(GOOD_MACHINE, disk_free=40_000_000), **DATA_ONLY), ExitCode.DISK)
    assert "40.0 MB are free on the disk of" in said
    assert "1.0 GB are wanted" in said
    assert "state/memory may be deleted between runs" in said


def test_a_gpu_that_is_too_small(hospital: Hospital) -> None:
    said = the_finding(hospital.checked(replace(GOOD_MACHINE, gpu=SMALL_GPU), **DATA_ONLY), ExitCode.GPU)
    assert "Quadro P400 has 300.0 MB free of 0.5 GB; this run wants 1.0 GB." in said
    assert 'a smaller training.batch_size, or set device = "cpu" in site.toml.' in said


def test_a_gpu_that_another_program_has(hospital: Hospital) -> None:
    busy = replace(SMALL_GPU, total=24 * SMALL_GPU.total)
    said = the_finding(hospital.checked(replace(GOOD_MACHINE, gpu=busy), **DATA_ONLY), ExitCode.GPU)
    assert "Another program has the GPU (nvidia-smi names it): end it." in said


def test_a_gpu_that_would_be_too_small_is_no_matter_where_it_is_not_used(hospital: Hospital) -> None:
    hospital.edit("[data]", 'device = "cpu"\n[data]')
    assert hospital.checked(replace(GOOD_MACHINE, gpu=SMALL_GPU), **DATA_ONLY).exit_code == 0


def test_fewer_gpus_than_are_asked_for(hospital: Hospital) -> None:
    hospital.edit("[data]", "gpus = 4\n[data]")
    large = Gpu("H100", 80 * GB, 79 * GB, 2)
    said = the_finding(hospital.checked(replace(GOOD_MACHINE, gpu=large), **DATA_ONLY), ExitCode.GPU)
    assert "gpus is 4, but this machine shows 2 GPUs. Set 2." in said
    assert hospital.checked(replace(GOOD_MACHINE, gpu=replace(large, count=4)), **DATA_ONLY).exit_code == 0


def test_gpus_that_are_there_and_how_many_are_used(hospital: Hospital) -> None:
    machine = replace(GOOD_MACHINE, gpu=Gpu("H100", 80 * GB, 79 * GB, 2))
    said = "\n".join(hospital.checked(machine, **DATA_ONLY).areas[1].passed)
    assert "2 GPUs, 1 of them used" in said


def test_a_gpu_that_is_asked_for_and_not_there(hospital: Hospital) -> None:
    hospital.edit("[data]", 'device = "cuda"\n[data]')
    said = the_finding(hospital.checked(**DATA_ONLY), ExitCode.GPU)
    assert "this machine shows no GPU" in said
    assert "--gpus all" in said


def test_too_little_memory(hospital: Hospital) -> None:
    result = hospital.checked(replace(GOOD_MACHINE, memory_free=500_000_000), **DATA_ONLY)
    assert "training.batch_size" in the_finding(result, ExitCode.MEMORY, Severity.WARNING)


def test_a_private_key_that_others_may_read(hospital: Hospital) -> None:
    said = the_finding(hospital.checked(replace(GOOD_MACHINE, key_mode=0o644), **DATA_ONLY), ExitCode.PERMISSIONS)
    assert "may be read by others (mode 644). Run: chmod 600" in said


def test_a_folder_that_may_not_be_written(hospital: Hospital) -> None:
    said = the_finding(hospital.checked(replace(GOOD_MACHINE, writable=False), **DATA_ONLY), ExitCode.PERMISSIONS)
    assert "user 10001 may not write to" in said
    assert "chown -R 10001" in said


# ---------------------------------------------------------------------- several at once


def test_of_several_findings_all_are_told_and_the_first_of_the_gravest_gives_the_exit_code(hospital: Hospital) -> None:
    (hospital.folder / "images" / "00003.png").write_bytes(b"")
    result = hospital.at("fl.invalid:9092").checked(replace(GOOD_MACHINE, disk_free=1, gpu=SMALL_GPU))
    codes = [int(finding.exit_code) for area in result.areas for finding in area.findings if finding.severity]
    assert codes == [20, 30, 32, 41]
    assert result.exit_code == 20


def test_images_of_another_size_are_counted_in_full_though_few_are_decoded(tmp_path: Path) -> None:
    hospital = hospital_in(tmp_path / "north", images=90)
    (data,) = [area for area in hospital.checked(images=7, **DATA_ONLY).areas if area.area == "data"]
    assert (data.facts["images"], data.facts["decoded"]) == (90, 7)
    write_images(tmp_path / "more", 3, size=48)
    Image.open(tmp_path / "more" / "images" / "00000.png").save(hospital.folder / "images" / "00000.png")
    (data,) = [area for area in hospital.checked(images=None, **DATA_ONLY).areas if area.area == "data"]
    assert data.facts["decoded"] == 90
    assert any("32 × 32 to 48 × 48 pixels" in line for line in data.passed)


@pytest.mark.torture
def test_a_real_file_system_of_8_mb(hospital: Hospital) -> None:
    small = hospital.folder.parent / "small"
    small.mkdir()
    steps = (
        f"mount -t tmpfs -o size=8m,mode=700 tmpfs {small}",
        f"cp -r {hospital.folder}/. {small}",
        f"{sys.executable} -m client.cli check {small} --offline --json",
    )
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", " && ".join(steps)], capture_output=True, text=True, timeout=300, check=False
    )
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip(f"needs a mount of its own: {ended.stderr.strip()}")
    told = json.loads(ended.stdout)
    assert ended.returncode == told["exit_code"] == ExitCode.DISK
    assert told["areas"]["machine"]["facts"]["disk_free"] < 8 * 2**20
