"""A PACS over DICOMweb: right answers, hostile and broken ones, and what hospital IT may write into the file."""

import base64
import gc
import gzip
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from polyclinic.client.check.data import check_site_data
from polyclinic.client.site.settings import read_site_settings
from polyclinic.client.site.site_file import read_site_toml_without_data
from polyclinic.common.errors import BadInput
from polyclinic.common.hosts import normalize_host, permit_hosts
from polyclinic.data.base.image_set import DatasetSplits, are_all_patients_known
from polyclinic.data.base.spec import DicomwebDatasetSpec, list_dataset_uses
from polyclinic.data.connections import list_dataset_connections
from polyclinic.data.dicomweb import client, search
from polyclinic.data.dicomweb.archive import PacsImageCache
from polyclinic.data.images.pixel_cache import CACHE_MARK_FILE
from polyclinic.data.load import load_dataset
from polyclinic.data.sources.dicomweb import PacsLabelTable, open_dicomweb_table
from tests.certificates import self_signed
from tests.data.dicom_files import decode_dicom_pixels, deflated
from tests.data.fake_pacs import BOUNDARY, FakePacs, Picture, as_json, drops, multipart, picture, reply, running

STUDIES = 10
MEMBERS = [picture(number, study, f"P{study // 2}") for study in range(STUDIES) for number in (1, 2)]
NOTE = picture(3, 0, "P0", "SR")
"""A report, which is no picture."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tries come at once."""
    monkeypatch.setattr(client, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))


@dataclass
class Site:
    """A hospital's folder with its tables, and its PACS."""

    pacs: FakePacs
    folder: Path

    def spec(self, **settings: Any) -> DicomwebDatasetSpec:
        common = {"kind": "dicomweb", "url": self.pacs.url, "labels": "labels.csv", "label_columns": ["Mass"]}
        key = {} if any(name.endswith("_column") for name in settings) else {"study_column": "study"}
        return DicomwebDatasetSpec.model_validate({**common, **key, "image_size": 16, "timeout_s": 5, **settings})

    def load(self, **settings: Any) -> DatasetSplits:
        spec = self.spec(**settings)
        with permit_hosts(list_dataset_uses(spec, self.folder), self.secrets_path):
            return load_dataset(spec, self.folder)

    def open(self, **settings: Any) -> PacsLabelTable:
        spec = self.spec(**settings)
        with permit_hosts(list_dataset_uses(spec, self.folder), self.secrets_path):
            return open_dicomweb_table(spec, self.folder)

    def fault(self, **settings: Any) -> str:
        """All that a person reads when the data cannot be loaded."""
        with pytest.raises(BadInput) as bad:
            self.load(**settings)
        return str(bad.value)

    @property
    def host(self) -> str:
        return f"http://127.0.0.1:{self.pacs.port}"

    @property
    def secrets_path(self) -> Path:
        return self.folder / "secrets.toml"

    def keep(self, entry: str, host: str = "", mode: int = 0o600) -> None:
        """Write the user's file of secrets, with one table."""
        self.secrets_path.write_text(f'["{host or self.host}"]\n{entry}\n', encoding="utf-8")
        self.secrets_path.chmod(mode)

    def keep_password(self, content: str, mode: int = 0o600) -> None:
        """Write a secret into a file of its own, which the file of secrets names."""
        (self.folder / "secret").write_text(content, encoding="utf-8")
        (self.folder / "secret").chmod(mode)
        self.keep('authentication = "basic"\nsecret_file = "secret"')

    @property
    def cache(self) -> Path:
        return self.folder / "dicomweb-cache"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    studies = [f"1.2.{study},A{study},{study % 2}" for study in range(STUDIES)]
    (tmp_path / "labels.csv").write_text("\n".join(["study,accession,Mass", *studies]), encoding="utf-8")
    images = [f"{image.instance},{image.study},{place % 2}" for place, image in enumerate(MEMBERS)]
    (tmp_path / "images.csv").write_text("\n".join(["image,study,Mass", *images]), encoding="utf-8")
    with running(FakePacs([*MEMBERS, NOTE])) as server:
        yield Site(server, tmp_path)


def all_pixels(splits: DatasetSplits) -> set[bytes]:
    return {image.tobytes() for part in splits.parts for image in part.images}


def shown(pictures: list[Picture]) -> set[bytes]:
    return {decode_dicom_pixels(image.content).tobytes() for image in pictures}


# Right answers


@pytest.mark.parametrize("column", ["study", "accession"])
def test_all_pictures_of_the_tables_studies_are_loaded_page_by_page(site: Site, column: str) -> None:
    splits = site.load(**{f"{column}_column": column})
    assert all_pixels(splits) == shown(MEMBERS)
    assert max(int(request.query["offset"]) for request in site.pacs.requests if request.query) == 3


def test_images_are_found_one_by_one_and_faster_where_their_study_is_named(site: Site) -> None:
    table = {"labels": "images.csv", "instance_column": "image"}
    assert all_pixels(site.load(**table, cache="one")) == shown(MEMBERS)
    searches = sum(bool(request.query) for request in site.pacs.requests)
    site.pacs.requests.clear()
    assert all_pixels(site.load(**table, study_column="study", cache="two")) == shown(MEMBERS)
    assert sum(bool(request.query) for request in site.pacs.requests) < searches


def test_the_second_load_asks_for_nothing_and_files_are_their_owners_alone(site: Site) -> None:
    first = site.load()
    site.pacs.requests.clear()
    assert all_pixels(first) == all_pixels(site.load())
    assert site.pacs.requests == []
    assert site.cache.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in site.cache.iterdir()} == {0o600}


def test_patients_are_those_that_the_archive_names_and_else_one_for_each_study(site: Site) -> None:
    opened = site.open()
    assert opened.patients_from_archive
    assert set(opened.table.patients) == {f"P{number}" for number in range(STUDIES // 2)}
    site.pacs.pictures = [replace(MEMBERS[0], patient=""), *MEMBERS[1:]]  # another image of its study has a name
    opened = site.open(cache="one")
    assert set(opened.table.patients) == {f"P{number}" for number in range(STUDIES // 2)}
    site.pacs.pictures = [replace(image, patient="") for image in MEMBERS]
    opened = site.open(cache="nameless")
    assert not opened.patients_from_archive
    assert len(set(opened.table.patients)) == STUDIES
    assert not are_all_patients_known(opened.table.patients)


def answer_with(monkeypatch: pytest.MonkeyPatch, tag: str, element: Callable[[Picture], object]) -> None:
    """Have the server return something else for an attribute."""
    truth = Picture.as_json
    monkeypatch.setattr(Picture, "as_json", lambda image: truth(image) | {tag: element(image)})


@pytest.mark.parametrize(
    "write",
    [
        lambda number: {"Value": [float(number)]},
        lambda number: {"Value": [number]},
        lambda number: {"Value": [{"Alphabetic": f"{number}"}]},
        lambda number: {"Value": f"{number}"},
        lambda number: {"Value": [None, f" {number}"]},
        lambda number: f"{number}",
    ],
)
def test_a_patient_is_read_in_the_forms_of_other_servers(
    write: Callable[[int], object], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, "00100020", lambda image: write(int(image.patient[1:])))
    assert set(site.open().table.patients) == {str(number) for number in range(STUDIES // 2)}


@pytest.mark.parametrize(
    ("element", "words"),
    [({"Value": ["P1", "P2"]}, "several PatientIDs"), ({"Value": [[1]]}, "patient"), ({"Value": [1.5]}, "patient")],
)
def test_an_unreadable_patient_is_refused(
    element: object, words: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, "00100020", lambda image: element)
    assert words in site.fault()


def test_images_count_where_the_server_does_not_say_their_rows(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "00280010", lambda image: {"vr": "US"})
    assert all_pixels(site.load()) == shown(MEMBERS)


def test_lines_without_an_image_are_a_fault_or_left_out(site: Site) -> None:
    assert "10 of 10 lines of labels.csv have no image" in site.fault(modalities=["CR"], cache="one")
    site.pacs.pictures = MEMBERS[4:]
    assert "2 of 10 lines of labels.csv have no image in the PACS, line 2 first." in site.fault()
    assert site.load(missing_files="ignore").train.missing == 2
    site.pacs.pictures = MEMBERS
    assert all_pixels(site.load()) == shown(MEMBERS)  # what was missing is asked for again


# The cache


def test_the_cache_stays_within_its_limit_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    cache = PacsImageCache(tmp_path / "cache", largest=10_000)
    cache.open_cache_folder()
    data = MEMBERS[0].content[:132] + bytes(1868)  # 2,000 bytes
    for number in range(4):
        cache.write_image_to_cache(f"1.{number}", data)
        os.utime(cache.get_cached_image_path(f"1.{number}"), (number, number))
    assert cache.read_cached_image("1.0") == data  # used just now
    for number in range(4, 30):
        cache.write_image_to_cache(f"1.{number}", data)
        assert sum(file.stat().st_size for file in cache.folder.glob("*.dcm")) <= 10_000
        assert cache.read_cached_image("1.0") == data
    assert cache.read_cached_image("1.1") is None


def test_a_cache_smaller_than_the_data_still_gives_all_of_it(site: Site) -> None:
    small = site.load(cache_gb=3.5 * len(MEMBERS[0].content) / 1e9)
    assert all_pixels(small) == shown(MEMBERS)
    assert 1 <= len(list(site.cache.glob("*.dcm"))) <= 3


def test_what_a_kill_left_is_removed_and_the_rest_is_taken_up(site: Site) -> None:
    site.load()
    cache = site.cache
    (cache / ".1.2.3.1.dcm.999999999-1.part").write_bytes(b"half")
    (cache / "1.2.3.1.dcm").write_bytes(b"")  # a power cut
    places = cache / "places.jsonl"
    places.write_bytes(places.read_bytes()[:-40])
    site.pacs.requests.clear()
    assert all_pixels(site.load()) == shown(MEMBERS)
    assert sum("/instances/" in request.path for request in site.pacs.requests) == 1
    assert not list(cache.glob(".*.part"))
    assert {request.path for request in site.pacs.requests if request.query} == {"/dicom-web/studies/1.2.9/instances"}


def test_a_folder_with_files_of_others_is_no_cache(site: Site) -> None:
    (site.folder / "archive").mkdir()
    (site.folder / "archive" / "1.2.3.dcm").write_bytes(b"the hospital's own")
    message = site.fault(cache="archive")
    assert "holds files that are not this cache's" in message
    assert [file.name for file in (site.folder / "archive").iterdir()] == ["1.2.3.dcm"]
    assert "holds files" in site.fault(cache=".")
    assert not (site.folder / CACHE_MARK_FILE).exists()
    (site.folder / "labels.csv").chmod(0o644)
    assert "labels.csv is no folder" in site.fault(cache="labels.csv")
    assert (site.folder / "labels.csv").stat().st_mode & 0o777 == 0o644


# Secrets


def test_a_password_from_a_file_and_a_token_from_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.pacs.secret = f"Basic {base64.b64encode(b'anna:a long: word').decode()}"
    site.keep_password("anna:a long: word\n")
    assert len(site.load().train)
    site.pacs.secret = "Bearer t0ken.x-y"
    monkeypatch.setenv("PACS_TOKEN", "t0ken.x-y")
    site.keep('authentication = "bearer"\nsecret_env = "PACS_TOKEN"')
    assert len(site.load(cache="two").train)
    site.keep('authentication = "bearer"\nsecret = "t0ken.x-y"')
    assert len(site.load(cache="three").train)


def test_nothing_is_sent_to_a_host_that_nobody_has_agreed_to(site: Site) -> None:
    spec = site.spec()
    (agreed,) = list_dataset_uses(spec, site.folder)
    for host in ("http://127.0.0.1", "https://127.0.0.1:443", f"https://127.0.0.1:{site.pacs.port}"):
        permit = permit_hosts([replace(agreed, host=host)], site.secrets_path)
        with permit, pytest.raises(BadInput, match="nobody has agreed"):
            load_dataset(spec, site.folder)
    with pytest.raises(BadInput, match="nobody has agreed"):
        load_dataset(spec, site.folder)
    assert site.pacs.requests == []


@pytest.mark.parametrize("other", [{"column": "name"}, {"table": "/other.csv"}, {"address": "https://127.0.0.1/other"}])
def test_an_agreement_to_one_column_of_one_table_is_none_to_another(site: Site, other: dict[str, str]) -> None:
    spec = site.spec()
    (agreed,) = list_dataset_uses(spec, site.folder)
    permit = permit_hosts([replace(agreed, **other)], site.secrets_path)
    with permit, pytest.raises(BadInput, match="what was agreed to is another use"):
        load_dataset(spec, site.folder)
    assert site.pacs.requests == []


OTHER_HOSTS = ("http://127.0.0.1", "http://localhost:{port}", "https://127.0.0.1:{port}", "http://127.0.0.1.:{port}")


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_the_secret_of_another_host_is_not_sent(site: Site, host: str) -> None:
    site.keep('authentication = "basic"\nsecret = "anna:hush-hush"', host.format(port=site.pacs.port))
    assert len(site.load().train)
    assert {request.headers.get("authorization") for request in site.pacs.requests} == {None}


def test_a_host_is_the_same_in_any_case_and_with_its_usual_port() -> None:
    same = ("https://pacs.example", "HTTPS://PACS.Example:443/", "https://pacs.example/dicom-web")
    assert {normalize_host(address) for address in same} == {"https://pacs.example:443"}
    assert normalize_host("http://[0:0::1]:8042/x") == "http://[::1]:8042"
    no_hosts = (
        "pacs.example",
        "ftp://pacs",
        "https://anna:word@pacs",
        "https://a b",
        "https://pacs:0",
        "https://[::::]",
    )
    for address in no_hosts:
        with pytest.raises(ValueError, match="is"):
            normalize_host(address)


def test_a_wrong_password_is_said_and_not_repeated(site: Site, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    site.pacs.secret = "Basic other"
    site.keep_password("anna:hush-hush")
    message = site.fault()
    assert f"127.0.0.1:{site.pacs.port} does not accept the authentication (401)." in message
    everything = message + caplog.text
    assert "hush" not in everything
    assert base64.b64encode(b"anna:hush-hush").decode() not in everything
    assert "1.2.3" not in caplog.text  # nor an identifier of a study
    assert len(site.pacs.requests) <= 4  # one for each connection


def test_a_server_that_wants_a_secret_and_gets_none(site: Site) -> None:
    site.pacs.secret = "Basic other"
    assert f"No secret was sent, because {site.secrets_path} has none for {site.host}." in site.fault()


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("anna:hush", 0o640, "may be read by others (mode 640)"),
        ("", 0o600, "must be one line of letters, digits and signs"),
        ("anna:hush\nX-Other: y", 0o600, "must be one line of letters, digits and signs"),
        ("hush", 0o600, "must be NAME:PASSWORD"),
        ("hush" * 5_000, 0o600, "too large for a secret"),
    ],
)
def test_a_file_that_holds_no_secret(site: Site, content: str, mode: int, words: str) -> None:
    site.keep_password(content, mode)
    message = site.fault()
    assert words in message
    assert "hush" not in message
    assert site.pacs.requests == []


BASIC, WORD = 'authentication = "basic"', 'secret = "anna:hush"'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'["HOST"]\n{WORD}', 'must be "bearer" (a token) or "basic"'),
        ('["HOST"]\nauthentication = "anna:hush"', 'must be "bearer" (a token) or "basic"'),
        (f'["HOST"]\n{BASIC}', 'needs one of "secret", "secret_file", "secret_env"'),
        (f'["HOST"]\n{BASIC}\n{WORD}\nsecret_env = "P"', "needs one of"),
        (f'["HOST"]\n{BASIC}\nsecret = ["anna:hush"]', "must be text in quotes"),
        (f'["HOST"]\n{BASIC}\npassword = "anna:hush"', "is not a known key"),
        (f'["HOST"]\n{BASIC}\nsecret_env = "NO_SUCH_TOKEN"', "the environment variable NO_SUCH_TOKEN is not set"),
        (f'["HOST"]\n{BASIC}\nsecret_file = "no"', "cannot be read: No such file"),
        (f'["HOST"]\n{BASIC}\n{WORD}\nca_file = "ca.pem"', "needs an address that begins with https"),
        (f'["http://anna:hush@pacs"]\n{BASIC}\n{WORD}', 'table 1 is not "https://HOST"'),
        (f'["HOST/dicom-web"]\n{BASIC}\n{WORD}', "names a path"),
        (f'["HOST"]\n{BASIC}\n{WORD}\n["HOST/"]\n{BASIC}\n{WORD}', "has two tables"),
        ('"HOST" = "anna:hush"', "must be a table"),
    ],
)
def test_a_file_of_secrets_with_a_fault_is_not_quoted(site: Site, text: str, words: str) -> None:
    site.secrets_path.write_text(text.replace("HOST", site.host), encoding="utf-8")
    site.secrets_path.chmod(0o600)
    message = site.fault()
    assert words in message
    assert "hush" not in message
    assert site.pacs.requests == []


def test_a_file_of_secrets_that_others_may_read_is_refused(site: Site) -> None:
    site.keep(f"{BASIC}\n{WORD}", mode=0o644)
    assert f"Run: chmod 600 {site.secrets_path}" in site.fault()
    assert site.pacs.requests == []


def test_a_secret_goes_to_no_other_machine_without_tls(site: Site) -> None:
    site.keep(f"{BASIC}\n{WORD}", "http://pacs.invalid:80")
    assert "a secret is sent by https alone" in site.fault(url="http://pacs.invalid/dicom-web")


@pytest.fixture
def tls_site(site: Site) -> Iterator[Site]:
    """The same with TLS, and a certificate of the hospital's own."""
    _, both = self_signed(site.folder)
    with running(FakePacs(MEMBERS, secret=f"Basic {base64.b64encode(b'anna:hush').decode()}"), both) as server:
        yield Site(server, site.folder)


def test_a_ca_beside_the_secret_is_what_the_host_is_checked_by(tls_site: Site) -> None:
    host = tls_site.pacs.url.removesuffix("/dicom-web")
    tls_site.keep(f"{BASIC}\n{WORD}", host)
    assert "is not accepted: self-signed certificate" in tls_site.fault()
    tls_site.keep(f'{BASIC}\n{WORD}\nca_file = "pacs.pem"', host)
    assert len(tls_site.load().train)


def test_a_ca_of_the_data_does_not_decide_who_is_sent_a_secret(tls_site: Site) -> None:
    """Otherwise the author of an experiment file answers in the name of the user's own PACS."""
    tls_site.keep(f"{BASIC}\n{WORD}", tls_site.pacs.url.removesuffix("/dicom-web"))
    message = tls_site.fault(ca_file="pacs.pem")
    assert 'write ca_file = "pacs.pem" below this host in' in message
    assert tls_site.pacs.requests == []
    tls_site.pacs.secret = ""
    tls_site.secrets_path.unlink()
    assert len(tls_site.load(ca_file="pacs.pem").train)  # a server that is sent none


def test_a_secret_does_not_follow_a_redirection(site: Site) -> None:
    site.keep_password("anna:x")
    with running(FakePacs(MEMBERS)) as other:
        site.pacs.instead["studies"] = lambda request: reply(b"", status=307, Location=other.url + request.path)
        message = site.fault()
    assert f"sends on to 127.0.0.1:{other.port} (307), where nothing is sent" in message
    assert other.requests == []


def test_a_hospitals_check_names_what_its_pacs_is_sent(site: Site) -> None:
    site.pacs.secret = f"Basic {base64.b64encode(b'anna:hush').decode()}"
    site.keep(f"{BASIC}\n{WORD}")
    data = site.spec(accession_column="accession").model_dump(exclude_defaults=True, mode="json")
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items()]
    text = "\n".join(['name = "north"', "[data]", *lines])
    (site.folder / "site.toml").write_text(text, encoding="utf-8")
    passed = check_site_data(read_site_settings(site.folder), None).area.passed
    (sent,) = [line for line in passed if line.startswith("sent to it: ")]
    assert 'each value of column "accession" of labels.csv, 10 in all' in sent
    assert f"your secret for {site.host} (basic, from {site.secrets_path})" in sent
    assert "hush" not in "".join(passed)


def test_the_author_of_a_file_writes_no_line_of_his_own_into_the_question(site: Site) -> None:
    spec = site.spec(labels="labels.csv\n  http://pacs.of.the.user (data.url)")
    (connection,) = list_dataset_connections(spec, site.folder, site.secrets_path)
    assert not any("\n" in line for line in connection.describe())


NAMES_OF_PERSONS = ("Doe^Anna", "Anna Doe", "Doe,Anna", "a name of more than sixteen characters")


def test_values_that_look_like_names_are_counted_for_the_person_who_is_asked(site: Site) -> None:
    rows = [f'"{name}",1' for name in (*NAMES_OF_PERSONS, "A1")]
    (site.folder / "labels.csv").write_text("\n".join(["patient,Mass", *rows]), encoding="utf-8")
    spec = site.spec(accession_column="patient")
    (quiet,) = list_dataset_connections(spec, site.folder, site.secrets_path)
    assert "5 in all (4 of them are longer than an AccessionNumber" in quiet.sent[0]
    (shown,) = list_dataset_connections(spec, site.folder, site.secrets_path, samples=True)
    assert ": Doe^Anna, Anna Doe, Doe,Anna, ..." in shown.sent[0]


def test_a_proxy_of_the_environment_sees_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakePacs([])) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert len(site.load().train)
    assert proxy.requests == []


# What hospital IT may write


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "pacs.example/dicom-web"}, "must be .https://HOST"),
        ({"url": "https://pacs/dicom-web?x=1"}, "must be .https://HOST"),
        ({"url": "file:///etc/passwd"}, "must be .https://HOST"),
        ({"url": "https://pacs:99999/x"}, "must be .https://HOST"),
        ({"url": "https://[::::]/x"}, "must be .https://HOST"),
        ({"url": "https://127.0.0.1@evil.example/x"}, "must be .https://HOST"),
        ({"authentication": "basic"}, "a secret is the user's own and no part of this file"),
        ({"secret_env": "P"}, "a secret is the user's own and no part of this file"),
        ({"authentication": "bearer", "secret_file": "p"}, "a secret is the user's own and no part of this file"),
        ({"study_column": None}, "give instance_column, study_column or accession_column"),
        ({"accession_column": "accession", "study_column": "study"}, "not both"),
        ({"password": "hush-hush"}, "Extra inputs"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], words: str) -> None:
    common = {"kind": "dicomweb", "url": "https://pacs/dicom-web", "labels": "labels.csv", "label_columns": ["Mass"]}
    with pytest.raises(ValidationError, match=words):
        DicomwebDatasetSpec.model_validate({**common, "study_column": "study", **settings})


NO_UIDS = ("1.2.840.1.13E+15", "../../etc/passwd", "1.2/../../3", "1.2.3?x=y", "1." * 40 + "1")


@pytest.mark.parametrize(("cell", "column"), [*((cell, "study") for cell in NO_UIDS), ("A*", "accession")])
def test_names_that_are_none_are_refused_before_anything_is_asked(site: Site, cell: str, column: str) -> None:
    (site.folder / "labels.csv").write_text(f"{column},Mass\n1.2.3,1\n{cell},0\n", encoding="utf-8")
    message = site.fault(**{f"{column}_column": column})
    assert "line 3 first" in message
    assert site.pacs.requests == []
    assert not (site.cache).exists()


def test_a_password_in_the_address_is_refused_and_not_repeated(tmp_path: Path) -> None:
    text = 'name = "north"\n[data]\nkind = "dicomweb"\nurl = "https://anna:hush-hush@pacs/dicom-web"\n'
    (tmp_path / "site.toml").write_text(f'{text}labels = "labels.csv"\nstudy_column = "study"\n', encoding="utf-8")
    with pytest.raises(BadInput, match="without a name, a password") as bad:
        read_site_toml_without_data(tmp_path)
    assert "hush" not in str(bad.value)


NAMES = ("pacs.invalid", "a..b", "-", "x" * 70)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1:1", "127.0.0.1:1 cannot be reached: no connection at 4 tries."),
        *((name, f"the name of {name} is not known to this machine") for name in NAMES),
    ],
)
def test_names_that_no_host_has_and_a_port_at_which_nobody_listens(site: Site, host: str, words: str) -> None:
    assert words in site.fault(url=f"http://{host}/dicom-web")


def test_a_service_that_speaks_no_tls(site: Site) -> None:
    message = site.fault(url=f"https://127.0.0.1:{site.pacs.port}/dicom-web", timeout_s=1)
    assert "does not speak TLS as expected" in message or "no connection" in message


# Searches that are answered wrongly

DICOM_JSON = "application/dicom+json"
PATH_FOR_A_UID = {**MEMBERS[0].as_json(), "00080018": {"vr": "UI", "Value": ["../../1.2.3"]}}
WRONG_SEARCHES: dict[str, tuple[Callable[[Any], Iterator[bytes]], str]] = {
    "another study": (lambda _: as_json([MEMBERS[-1].as_json()]), "answered a search for one study with another one"),
    "a path": (lambda _: as_json([PATH_FOR_A_UID]), "without the UID (instance) of digits and dots"),
    "another service": (lambda _: reply(b"<html>Welcome</html>", "text/html"), "is no DICOM JSON"),
    "no list": (lambda _: reply(b'{"a": 1}', DICOM_JSON), "is no list of objects"),
    "damaged": (lambda _: reply(b'[{"0008', DICOM_JSON), "is damaged JSON"),
    "deep": (lambda _: reply(b"[" * 100_000, DICOM_JSON), "is damaged JSON"),
    "error": (lambda _: reply(b"", status=500), "the server answers 500"),
}


@pytest.mark.parametrize("name", WRONG_SEARCHES)
def test_searches_that_are_answered_wrongly(site: Site, name: str) -> None:
    site.pacs.instead["/studies/1.2.0/"], words = WRONG_SEARCHES[name]
    message = site.fault()
    assert 'data.url: a search for "1.2.0": ' in message
    assert words in message


def test_a_server_that_ignores_the_accession_number(site: Site) -> None:
    site.pacs.instead["/dicom-web/studies"] = lambda request: (
        as_json([MEMBERS[0].as_json()]) if request.path.endswith("/studies") else site.pacs.truth(request)
    )
    message = site.fault(accession_column="accession")
    assert "the server answered a search for one AccessionNumber with others" in message


def test_pages_without_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_PAGES", 20)
    site.pacs.instead["/studies/1.2.0/"] = lambda request: as_json(
        [{**MEMBERS[0].as_json(), "00080018": {"vr": "UI", "Value": [f"1.2.{request.query['offset']}.7"]}}]
    )
    assert "a search has no end: more than 20 pages" in site.fault()
    assert sum("/studies/1.2.0/" in request.path for request in site.pacs.requests) == 20


def test_the_same_page_again_and_again_is_the_end(site: Site) -> None:
    site.pacs.instead["/studies/1.2.0/"] = lambda request: (
        site.pacs.truth(request) if "/series/" in request.path else as_json([image.as_json() for image in MEMBERS[:2]])
    )
    assert all_pixels(site.load()) == shown(MEMBERS)


# Images that are sent wrongly: each is left out with its reason, and the budget decides


@cache
def deflated_bomb() -> bytes:
    """300 kB that inflate to 300 MiB."""
    return deflated(MEMBERS[6].content, 300 << 20)


PARTS = f"multipart/related; boundary={BOUNDARY}"
OK, NO_HTTP = b"HTTP/1.1 200 OK\r\n", "breaks off or is no HTTP"
WRONG_IMAGES: dict[str, tuple[Callable[[bytes], Iterator[bytes]], str]] = {
    "404": (lambda _: reply(b"", status=404), "the server does not have it (404)"),
    "406": (lambda _: reply(b"", status=406), "the server answers 406"),
    "a page": (lambda _: reply(b"<html>", "text/html"), 'the answer is "text/html"'),
    "another image": (lambda _: multipart(MEMBERS[-1].content), "the server sent another image"),
    "no DICOM": (lambda _: multipart(b"\x89PNG"), "is no DICOM file, or a damaged one"),
    "several": (lambda good: multipart(good, copies=2), "holds several parts"),
    "other part": (lambda good: multipart(good, "image/png"), 'the part is "image/png", not a DICOM file'),
    "a deflated bomb": (lambda _: multipart(deflated_bomb()), "is no DICOM file, or a damaged one"),
    "no end": (
        lambda good: reply(f"--{BOUNDARY}\r\nContent-Type: application/dicom\r\n\r\n".encode() + good, PARTS),
        "the answer is cut off",
    ),
    "no boundary": (lambda good: reply(good, "multipart/related"), "does not say where its parts end"),
    "no part": (lambda _: reply(f"--{BOUNDARY}--".encode(), PARTS), "holds no part"),
    "gzip": (
        lambda _: reply(gzip.compress(bytes(1 << 20)), Content_Encoding="gzip"),
        "compressed, which was not asked",
    ),
    "announced": (lambda _: reply(b"", Content_Length=str(1 << 40)), "the answer is larger than 1 MiB"),
    "too much": (lambda _: drops(OK + b"\r\n", bytes(1 << 18), 0), "the answer is larger than 1 MiB"),
    "negative": (lambda good: reply(good, Content_Length="-5"), NO_HTTP),
    "two lengths": (lambda good: reply(good, Content_Length="5, 6"), NO_HTTP),
    "no HTTP": (lambda _: iter([b"220 mail.example ESMTP\r\n\r\n"]), NO_HTTP),
    "chunk": (lambda _: iter([OK + b"Transfer-Encoding: chunked\r\n\r\n-8\r\nabc"]), NO_HTTP),
}


@pytest.mark.parametrize("names", [[*WRONG_IMAGES][first::3] for first in range(3)], ids=", ".join)
def test_images_that_are_sent_wrongly_are_left_out_with_the_reason(site: Site, names: list[str]) -> None:
    deflated_bomb()  # made before the server's time counts
    wrong, reasons = MEMBERS[6 : 6 + len(names)], dict[str, str]()
    for name, image in zip(names, wrong, strict=True):
        answer, reasons[f"{image.instance}.dcm"] = WRONG_IMAGES[name]
        site.pacs.instead[f"/instances/{image.instance}"] = partial(
            lambda make, image, _: make(image.content), answer, image
        )
    splits = site.load(largest_mb=1, skip_budget=0.5)
    skipped = {skip.name: skip.reason for part in splits.parts for skip in part.skipped}
    assert skipped.keys() == reasons.keys()
    assert [(name, reasons[name]) for name in reasons if reasons[name] not in skipped[name]] == []
    assert all_pixels(splits) == shown([image for image in MEMBERS if image not in wrong])
    assert not [image for image in wrong if (site.cache / f"{image.instance}.dcm").exists()]


def test_more_wrong_images_than_the_budget_allows_are_a_fault(site: Site) -> None:
    site.pacs.instead["/instances/"] = lambda _: multipart(MEMBERS[0].content)
    assert "19 of 20 images cannot be read" in site.fault()


def test_a_search_whose_answer_has_no_end_is_told_by_us_alone(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """The generator that reads the answer is closed before the loop ends: asyncio has nothing to say of it."""
    site.pacs.instead["/studies"] = lambda _: drops(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/dicom+json\r\n\r\n", bytes(1 << 20), 0
    )
    message = site.fault()
    gc.collect()
    assert "the answer is larger than" in message
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


DRIPS = {
    "the answer": lambda _: drops(b"HTTP/1.1 200 OK\r\n\r\n"),
    "a header": lambda _: drops(b"HTTP/1.1 200 OK\r\nX-Slow: "),
    "the first line": lambda _: drops(b"HTTP/1.1 2", b"0"),
    "nothing": lambda _: drops(b"", b"", 0.05),
}


@pytest.mark.parametrize("name", DRIPS)
def test_a_server_that_drips_is_given_up(site: Site, name: str) -> None:
    site.pacs.instead["/instances/"] = DRIPS[name]
    begin = time.monotonic()
    message = site.fault(timeout_s=0.3)
    assert "left 3 requests one after the other without a whole answer in time (0.3 s)" in message
    assert time.monotonic() - begin < 6


def test_a_server_that_stops_is_said_once_and_what_has_arrived_is_kept(site: Site) -> None:
    def until_ten(request: Any) -> Any:
        sent = sum("/series/" in other.path for other in site.pacs.requests)
        return reply(b"", status=503) if sent > 10 else site.pacs.truth(request)

    site.pacs.instead["/series/"] = until_ten
    message = site.fault()
    assert "says that it is overloaded or not running (503), at each of several tries" in message
    assert len(message.splitlines()) == 1
    cached = len(list((site.cache).glob("*.dcm")))
    assert cached >= 8
    site.pacs.instead.clear()
    site.pacs.requests.clear()
    assert all_pixels(site.load()) == shown(MEMBERS)
    assert len(site.pacs.requests) == len(MEMBERS) - cached


def test_a_server_that_is_overloaded_for_a_moment_is_asked_again(site: Site) -> None:
    refused = set[str]()

    def at_first(request: Any) -> Any:
        first = request.path not in refused
        refused.add(request.path)
        return reply(b"", status=503) if first else site.pacs.truth(request)

    site.pacs.instead["/series/"] = at_first
    assert all_pixels(site.load()) == shown(MEMBERS)


def test_ctrl_c_breaks_off_what_is_under_way(site: Site) -> None:
    site.pacs.instead["/instances/"] = DRIPS["nothing"]
    main = threading.main_thread().ident
    assert main
    # These tests may run in the background of a shell, which has its programs ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            site.load(timeout_s=60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 5
    assert not any(thread.name == "dicomweb" for thread in threading.enumerate())


def test_a_full_disk_ends_the_load_with_the_folder(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    find = site.open()
    assert len(find.table.files) == len(MEMBERS)
    monkeypatch.setattr("polyclinic.data.dicomweb.archive.write_atomically", full)
    message = site.fault()
    assert "dicomweb-cache: the disk is full." in message
