"""A real PACS in the loop: Orthanc over TLS and with a password. Images as stored, kills, a check, an experiment.

Debian's Orthanc (1.10.1 with its OpenSSL) ends with a segmentation fault at the first request over TLS. So TLS ends in
front of it, in a relay of bytes, as it does in a hospital that has a reverse proxy.
"""

import json
import random
import select
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pydicom
import pytest
from pydicom import uid

import polyclinic.studies.cli
from polyclinic import load as load_run
from polyclinic.client.check.data import check_site_data
from polyclinic.client.site.settings import read_site_settings
from polyclinic.common.errors import BadInput
from polyclinic.common.hosts import permit_hosts
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.spec import DicomwebDatasetSpec, list_dataset_uses
from polyclinic.data.load import load_dataset
from tests.certificates import self_signed
from tests.data.dicom_files import decode_dicom_pixels
from tests.data.dicom_syntaxes import by_gdcm, by_pydicom, plain, source
from tests.network.real import typed

PROGRAM = shutil.which("Orthanc")
PLUGIN = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
IS_INSTALLED = PROGRAM is not None and PLUGIN.is_file()
MISSING = "needs a PACS: apt-get install orthanc orthanc-dicomweb"
USER, PASSWORD = "polyclinic", "not-a-secret"


@dataclass(frozen=True)
class Pacs:
    """A server that answers; ``ca_file`` judges its certificate.

    Attributes:
        port: Of the server itself, without TLS.
        tls_port: Of the relay in front of it.
    """

    port: int
    tls_port: int
    ca_file: Path

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.tls_port}/dicom-web"

    def administrator(self) -> httpx.Client:
        """Speak to it as its administrator."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", auth=(USER, PASSWORD), trust_env=False)

    def store(self, files: Iterable[bytes]) -> None:
        """Put these DICOM files into it."""
        with self.administrator() as client:
            for content in files:
                client.post("/instances", content=content).raise_for_status()


@contextmanager
def running(folder: Path) -> Iterator[Pacs]:
    """Start the server in a folder, with TLS and a password; end it in the end."""
    assert PROGRAM
    ca_file, both = self_signed(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    configuration = {
        "StorageDirectory": str(folder / "db"),
        "IndexDirectory": str(folder / "db"),
        "HttpPort": port,
        "DicomServerEnabled": False,
        "RemoteAccessAllowed": False,
        "AuthenticationEnabled": True,
        "RegisteredUsers": {USER: PASSWORD},
        "Plugins": [str(PLUGIN)],
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
    }
    (folder / "orthanc.json").write_text(json.dumps(configuration), encoding="utf-8")
    with (folder / "orthanc.log").open("wb") as log, relay(port, both) as tls_port:
        program = subprocess.Popen([PROGRAM, str(folder / "orthanc.json")], stdout=log, stderr=log, cwd=folder)
        pacs = Pacs(port, tls_port, ca_file)
        try:
            _wait(pacs, program, folder / "orthanc.log")
            yield pacs
        finally:
            program.terminate()
            program.wait(timeout=30)


def _wait(pacs: Pacs, program: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 60
    with pacs.administrator() as client:
        while time.monotonic() < until and program.poll() is None:
            try:
                client.get("/system").raise_for_status()
                return
            except httpx.TransportError:
                time.sleep(0.1)
    raise AssertionError(log.read_text(encoding="utf-8", errors="replace")[-3000:])


@contextmanager
def relay(port: int, certificate_and_key: Path) -> Iterator[int]:
    """Take TLS off what comes to a port of 127.0.0.1, which is returned, and hand it on to another."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_and_key)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as outside,
                socket.create_connection(("127.0.0.1", port)) as inside,
            ):
                _pumped(outside, inside)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def _pumped(outside: ssl.SSLSocket, inside: socket.socket) -> None:
    while True:
        ready = [outside] if outside.pending() else select.select([outside, inside], [], [], 60)[0]
        if not ready:
            return
        for side in ready:
            data = side.recv(65536)
            if not data:
                return
            (inside if side is outside else outside).sendall(data)


pytestmark = [pytest.mark.long, pytest.mark.skipif(not IS_INSTALLED, reason=MISSING)]
STUDIES = 30
ROOT = Path(__file__).parents[2]
LOAD = """
import pathlib, sys
from polyclinic.data.base.spec import DicomwebDatasetSpec, list_dataset_uses
from polyclinic.data.load import load_dataset
from polyclinic.common.hosts import permit_hosts
folder = pathlib.Path(sys.argv[1])
spec = DicomwebDatasetSpec.model_validate_json((folder / "spec.json").read_text())
with permit_hosts(list_dataset_uses(spec, folder), folder / "secrets.toml"):
    load_dataset(spec, folder)
"""
SYNTAXES = (uid.JPEGLosslessSV1, uid.JPEGLSLossless, uid.RLELossless, uid.JPEG2000Lossless)


def stored_files() -> list[bytes]:
    """Two images a study, in turn plain and packed as older archives do."""
    files = []
    for number in range(2 * STUDIES):
        study = number // 2
        pixels = np.roll(source(12), number)
        names = {
            "SOPInstanceUID": f"1.2.{study}.{number}",
            "StudyInstanceUID": f"1.2.{study}",
            "SeriesInstanceUID": f"1.2.{study}.9",
            "PatientID": f"P{study // 2}",
            "AccessionNumber": f"A{study}",
            "Modality": "DX",
        }
        data, syntax = plain(pixels, 12, **names), SYNTAXES[number % 4]
        pack = by_gdcm if syntax in SYNTAXES[:2] else by_pydicom
        files.append(data if number % 8 < 4 else pack(data, syntax))
    return files


FILES = stored_files() if IS_INSTALLED else []


@pytest.fixture(scope="module")
def pacs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pacs]:
    with running(tmp_path_factory.mktemp("orthanc")) as server:
        server.store(FILES)
        yield server


@pytest.fixture
def folder(pacs: Pacs, tmp_path: Path) -> Path:
    rows = [f"1.2.{study},A{study},{study % 2},{study // 2 % 2}" for study in range(STUDIES)]
    (tmp_path / "labels.csv").write_text("\n".join(["study,accession,Mass,Fluid", *rows]), encoding="utf-8")
    (tmp_path / "pacs.pem").write_bytes(pacs.ca_file.read_bytes())
    (tmp_path / "pacs.secret").write_text(f"{USER}:{PASSWORD}\n", encoding="utf-8")
    (tmp_path / "pacs.secret").chmod(0o600)
    keep_secret(pacs, tmp_path)
    return tmp_path


def keep_secret(pacs: Pacs, folder: Path, ca_file: str = 'ca_file = "pacs.pem"') -> None:
    """Write a file of secrets, which says what the server's certificate is checked by."""
    entry = f'authentication = "basic"\nsecret_file = "pacs.secret"\n{ca_file}\n'
    (folder / "secrets.toml").write_text(f'["{pacs.url.removesuffix("/dicom-web")}"]\n{entry}', encoding="utf-8")
    (folder / "secrets.toml").chmod(0o600)


def settings(pacs: Pacs, **others: Any) -> dict[str, Any]:
    return {
        "kind": "dicomweb",
        "url": pacs.url,
        "labels": "labels.csv",
        "study_column": "study",
        "label_columns": ["Mass", "Fluid"],
        "image_size": 32,
        "resize": "stretch",
    } | others


def spec(pacs: Pacs, **others: Any) -> DicomwebDatasetSpec:
    return DicomwebDatasetSpec.model_validate(settings(pacs, **others))


def load(pacs: Pacs, folder: Path, **others: Any) -> DatasetSplits:
    """Load the data as a person who has agreed to the server."""
    data = spec(pacs, **others)
    with permit_hosts(list_dataset_uses(data, folder), folder / "secrets.toml"):
        return load_dataset(data, folder)


def as_toml(values: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {value!r}" for key, value in values.items()) + "\n"


@pytest.mark.parametrize("column", ["study", "accession"])
def test_every_image_arrives_as_it_is_stored(pacs: Pacs, folder: Path, column: str) -> None:
    keys = {"study_column": None} if column == "accession" else {}
    splits = load(pacs, folder, **keys, **{f"{column}_column": column})
    assert sum(map(len, splits.parts)) == len(FILES)
    cached = {file.stem: file.read_bytes() for file in (folder / "dicomweb-cache").glob("*.dcm")}
    assert len(cached) == len(FILES)
    for content in FILES:
        meta = pydicom.filereader.dcmread(pydicom.filebase.DicomBytesIO(content), stop_before_pixels=True)
        arrived = cached[str(meta.SOPInstanceUID)]
        stated = pydicom.filereader.dcmread(pydicom.filebase.DicomBytesIO(arrived), stop_before_pixels=True)
        assert stated.file_meta.TransferSyntaxUID == meta.file_meta.TransferSyntaxUID
        assert (decode_dicom_pixels(arrived) == decode_dicom_pixels(content)).all()


def test_a_certificate_of_another_is_not_accepted(pacs: Pacs, folder: Path) -> None:
    self_signed(folder)
    with pytest.raises(BadInput, match=r"certificate of 127.0.0.1:\d+ is not accepted: self-signed certificate"):
        load(pacs, folder)
    keep_secret(pacs, folder, ca_file="")
    with pytest.raises(BadInput, match="is not accepted"):
        load(pacs, folder)


def test_a_wrong_password_is_refused(pacs: Pacs, folder: Path) -> None:
    (folder / "pacs.secret").write_text(f"{USER}:wrong", encoding="utf-8")
    with pytest.raises(BadInput, match=r"does not accept the authentication \(401\)"):
        load(pacs, folder)


def test_what_is_killed_at_any_instant_goes_on_and_keeps_no_half_file(pacs: Pacs, folder: Path) -> None:
    (folder / "spec.json").write_text(spec(pacs, connections=1).model_dump_json(), encoding="utf-8")
    cache, kills, hand = folder / "dicomweb-cache", 0, random.Random(5)
    while kills < 8:
        program = subprocess.Popen([sys.executable, "-c", LOAD, str(folder)], cwd=ROOT)
        before = len(list(cache.glob("*.dcm")))
        while len(list(cache.glob("*.dcm"))) <= before + hand.randrange(3) and program.poll() is None:
            time.sleep(0.001)
        time.sleep(hand.random() * 0.02)
        program.send_signal(signal.SIGKILL)
        program.wait()
        kills += 1
        for file in cache.glob("*.dcm"):
            decode_dicom_pixels(file.read_bytes())
    assert len(list(cache.glob("*.dcm"))) < len(FILES)
    splits = load(pacs, folder)
    assert sum(map(len, splits.parts)) == len(FILES)
    assert not list(cache.glob(".*.part"))


def test_the_check_says_what_the_archive_answered(pacs: Pacs, folder: Path) -> None:
    table = (folder / "labels.csv").read_text(encoding="utf-8")
    (folder / "labels.csv").write_text(f"{table}\n1.2.999,A999,1,0\n", encoding="utf-8")
    text = f'name = "north"\n[data]\n{as_toml(settings(pacs))}missing_files = "ignore"\n'
    (folder / "site.toml").write_text(text, encoding="utf-8")
    checked = check_site_data(read_site_settings(folder), None).area
    name = pacs.url.split("/")[2]
    first = f"{name} answers: 60 images of 30 studies for 31 lines of the table; its certificate is accepted"
    assert checked.passed[0] == first
    (line,) = [line for line in checked.passed if line.startswith("transfer syntaxes of the 60 images looked at")]
    assert "32 Explicit VR Little Endian" in line
    assert "JPEG-LS Lossless" in line
    assert any("1 line of the table without an image: left out" in finding.problem for finding in checked.findings)
    assert f"PatientID, as {name} says" in "\n".join(checked.passed)
    assert PASSWORD not in str(checked)


def test_an_experiment_runs_on_the_archive(pacs: Pacs, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    text = '[run]\nmethod = "surgical"\nrounds = 1\n[model]\narchitecture = "tiny_cnn"\nchannels = 1\nimage_size = 32\n'
    text += f'[data]\n{as_toml(settings(pacs))}[partition]\nkind = "class_lists"\n'
    (folder / "pacs.toml").write_text(
        f'{text}[partition.lists]\neast = ["Mass"]\nnorth = ["Fluid"]\n', encoding="utf-8"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    (folder / "config").mkdir()
    (folder / "config" / "polyclinic").symlink_to(folder)
    ended = typed(polyclinic.studies.cli.main, "run", "pacs.toml", "--out", "runs/pacs", "--backend", "inline", "--yes")
    assert ended.code == 0, ended.out + ended.err
    assert load_run("runs/pacs").model_sha256
    everything = [file.read_bytes() for file in (folder / "runs").rglob("*") if file.is_file()]
    assert everything
    assert not any(PASSWORD.encode() in content for content in everything)
