"""What a coordinator sends as an app is a name and nothing more: a hospital runs what its own image holds."""

import hashlib
import io
import zipfile
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.client.connection.answer_bounds import BUNDLE_MAX_BYTES
from polyclinic.client.connection.fleet_client import ALLOWED_BUNDLE_FILES, find_app_bundle_fault
from polyclinic.server.deployment.superlink.fleet_service import APP_BUNDLE

NAME = ["pyproject.toml"]
"""All that our own coordinator puts into a bundle."""


def zipped(names: Iterable[str], filling: bytes = b"print('here')") -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as bundle:
        for name in names:
            bundle.writestr(name, filling)
    return archive.getvalue()


def fault_of(content: bytes) -> str:
    """What a site says of a bundle that is the one the run names."""
    return find_app_bundle_fault(content, hashlib.sha256(content).hexdigest())


def test_the_bundle_of_our_own_coordinator_is_accepted_and_one_with_code_is_refused() -> None:
    assert fault_of(APP_BUNDLE) == ""
    assert "carries client/app.py;" in fault_of(zipped([*NAME, "client/app.py"]))


@settings(max_examples=50)
@given(
    may=st.sets(st.sampled_from(sorted(ALLOWED_BUNDLE_FILES))),
    may_not=st.sets(
        st.sampled_from(["a.py", "pyproject.toml.py", "Pyproject.toml", "a/pyproject.toml", ".info/", "CONTENT"]),
        min_size=1,
    ),
)
def test_any_file_but_the_two_is_refused_whatever_lies_beside_it(may: set[str], may_not: set[str]) -> None:
    assert fault_of(zipped(sorted(may))) == ""
    assert f"carries {', '.join(sorted(may_not)[:5])};" in fault_of(zipped(sorted(may | may_not)))


def test_a_bundle_that_is_not_the_one_the_run_names_is_refused_whatever_it_holds() -> None:
    content = APP_BUNDLE
    named = hashlib.sha256(content).hexdigest()
    for other, expected in ((zipped(NAME), named), (content + b"\0", named), (b"", named), (content, "")):
        assert "is not the one" in find_app_bundle_fault(other, expected)


def test_a_bundle_has_64_kib_at_most() -> None:
    room = BUNDLE_MAX_BYTES - len(zipped(NAME, b""))
    largest, too_large = zipped(NAME, bytes(room)), zipped(NAME, bytes(room + 1))
    assert (len(largest), fault_of(largest)) == (65536, "")
    assert "65537 bytes" in fault_of(too_large)


@pytest.mark.parametrize("content", [b"", b"PK", b"import os", zipped(NAME)[:-1], zipped(NAME)[-60:]])
def test_what_is_no_whole_archive_is_refused(content: bytes) -> None:
    assert "cannot be read" in fault_of(content)


def test_no_damage_to_a_bundle_ends_the_sites_program() -> None:
    content = zipped(NAME)
    for place in range(len(content)):
        for value in (0, 255):
            assert isinstance(fault_of(content[:place] + bytes([value]) + content[place + 1 :]), str)
