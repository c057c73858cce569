"""The phrase of a public key: what it is computed from, what stays the same, and what a person may type."""

import hashlib
import itertools
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.errors import BadInput
from polyclinic.common.security.identity import (
    SiteConnectionKit,
    format_public_key_line,
    read_connection_kit,
    write_commented_toml_file,
)
from polyclinic.common.security.phrase import (
    compute_certificate_key_hash,
    compute_certificate_phrase,
    compute_public_key_phrase,
    find_phrase_difference,
    read_phrase_words,
)
from polyclinic.server.coordinator.authority import make_certificate_builder, make_certificate_subject

KEY = ec.derive_private_key(7, ec.SECP256R1())
PHRASE = "garden copper winter, salmon ticket oval"


def certificate_of(key: ec.EllipticCurvePrivateKey, name: str, days: int) -> str:
    """A certificate of an authority (PEM), signed by itself."""
    subject = make_certificate_subject(name)
    builder = make_certificate_builder(subject, subject, key.public_key(), days, is_authority=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(form.Encoding.PEM).decode()


def key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(form.Encoding.DER, form.PublicFormat.SubjectPublicKeyInfo)


def phrase_by_hand(key: bytes) -> str:
    """Six words, from the last ten bits of the hash to the first, by Python's own scrypt."""
    folder = Path(__file__).parents[2] / "common" / "security"
    words = (folder / "phrase_words.txt").read_text(encoding="ascii").split()
    digest = hashlib.scrypt(key, salt=b"polyclinic phrase", n=32768, r=8, p=1, maxmem=2**26, dklen=8)
    bits = f"{int.from_bytes(digest, 'big'):064b}"
    first, *others = (words[int(bits[end - 10 : end], 2)] for end in range(64, 4, -10))
    one, two, three, four, five = others
    return f"{first} {one} {two}, {three} {four} {five}"


def test_it_is_six_words_of_a_slow_hash_of_the_key() -> None:
    fresh_key = ec.generate_private_key(ec.SECP256R1())  # no other test of this process has computed its phrase
    certificate = certificate_of(fresh_key, "trial", 10)
    began = time.process_time()
    compute_certificate_phrase(certificate)
    assert time.process_time() - began > 0.02  # what an attacker pays for each key that he tries

    phrase = compute_certificate_phrase(certificate_of(KEY, "trial", 10))
    assert phrase == phrase_by_hand(key_bytes(KEY))
    line = KEY.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).decode()
    assert compute_public_key_phrase(f"{line} north") == phrase


def test_a_certificate_issued_anew_for_the_same_key_keeps_it_and_another_key_has_another() -> None:
    first, renewed = certificate_of(KEY, "trial", 10), certificate_of(KEY, "another name", 4000)
    other = certificate_of(ec.derive_private_key(8, ec.SECP256R1()), "trial", 10)
    phrases = [compute_certificate_phrase(each) for each in (first, renewed, other)]
    key_hashes = [compute_certificate_key_hash(each) for each in (first, renewed, other)]
    assert phrases[0] == phrases[1] != phrases[2]
    assert key_hashes[0] == key_hashes[1] == hashlib.sha256(key_bytes(KEY)).hexdigest() != key_hashes[2]


def distance(one: str, other: str) -> int:
    """Letters to change, add or leave out (Levenshtein)."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, start=1):
        above, row = row, [number]
        for column, another in enumerate(other):
            row.append(min(above[column + 1] + 1, row[-1] + 1, above[column] + (letter != another)))
    return row[-1]


def test_the_words_are_short_plain_and_unlike_one_another() -> None:
    words = read_phrase_words()
    assert len(set(words)) == len(words) == 1024
    assert all(word.isascii() and word.isalpha() and word.islower() and 4 <= len(word) <= 8 for word in words)
    near = [pair for pair in itertools.combinations(words, 2) if abs(len(pair[0]) - len(pair[1])) < 2]
    assert [pair for pair in near if distance(*pair) < 2] == []


def test_the_list_is_the_one_by_which_every_release_computes() -> None:
    text = " ".join(read_phrase_words())
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "e18994b626ce784d0d229b9391c3de0d6c617e35b9d075d3bd79aa9623775874"
    )


@pytest.mark.parametrize(
    "typed",
    [
        "garden copper winter salmon ticket oval",
        "  GARDEN Copper\twinter - salmon,ticket. oval\n",
        "1 garden 2 copper 3 winter 4 salmon 5 ticket 6 oval",
        "\uff27arden copper winter salmon ticket oval",  # a G of double width
    ],
)
def test_capitals_spaces_and_signs_do_not_count(typed: str) -> None:
    assert find_phrase_difference(typed, PHRASE) == ""


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("garden copper winter salmon ticket", "5 words"),
        ("garden copper winter salmon ticket oval oval", "7 words"),
        ("garden copper winters salmon ticket oval", "word 3"),
        ("copper garden winter salmon ticket oval", "word 1"),
        ("", "0 words"),
        ("garden", "it has 1 word instead of 6"),
        ("garden copper winter salmon ticket \u043eval", "word 6"),  # a Cyrillic o
    ],
)
def test_any_other_word_counts(typed: str, named: str) -> None:
    assert named in find_phrase_difference(typed, PHRASE)


@given(st.text())
def test_no_text_but_the_words_is_taken(typed: str) -> None:
    assert find_phrase_difference(typed, PHRASE) != ""


def test_a_kit_is_read_as_one_certificate_without_other_text(tmp_path: Path) -> None:
    """TLS would trust every certificate of the text; people see the phrase of the first."""
    own, stranger = (certificate_of(ec.generate_private_key(ec.SECP256R1()), "trial", 10) for _ in range(2))
    kit = SiteConnectionKit(
        coordinator="trial",
        address="fl.example:9092",
        site="north",
        public_key=format_public_key_line(KEY, "north"),
        ca_certificate=own,
    )
    for text in (f"words\n{own}{stranger}", f"{own}\n{own}"):
        write_commented_toml_file(tmp_path / "north.kit", kit.model_copy(update={"ca_certificate": text}), "")
        assert read_connection_kit(tmp_path / "north.kit").ca_certificate == own
    write_commented_toml_file(tmp_path / "north.kit", kit.model_copy(update={"ca_certificate": stranger[:300]}), "")
    with pytest.raises(BadInput, match="is no PEM certificate"):
        read_connection_kit(tmp_path / "north.kit")
