"""A public key as six common words, which two people compare by telephone.

A person who can change mail between a hospital and its coordinator can replace their keys. A telephone call is another
channel, on which words are understood better than the characters of a fingerprint.

A phrase has 60 bits: six of 1,024 words. They come from a slow hash (scrypt with 32 MB, a tenth of a second), so an
attacker pays a tenth of a second and 32 MB for each tried key. Finding a key with a given phrase takes 2**60 tries. A
listener may miss one wrong word; finding a phrase that differs in one word takes 2**50 / 6 tries.

The phrase depends on the key, not on the certificate, so a new certificate for the same key has the same phrase.
"""

import hashlib
import re
import unicodedata
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from polyclinic.common.system.plain_text import format_count_with_noun

PHRASE_WORDS = 6
WORD_BITS = 10
"""Number of bits that one word encodes."""
_SALT = b"polyclinic phrase"
_SCRYPT_COST, _SCRYPT_BLOCK, _SCRYPT_LANES = 2**15, 8, 1
"""Parameters n, r and p of RFC 7914. A change would give every key another phrase."""


@cache
def read_phrase_words() -> tuple[str, ...]:
    """Return the 1,024 words: 4 to 8 letters each; any two differ in at least two letters.

    They are a part of the English list of BIP-39 without homophones and unpleasant words. A change of the file would
    give every key another phrase.
    """
    words = (Path(__file__).parent / "phrase_words.txt").read_text(encoding="ascii").split()
    assert len(words) == 2**WORD_BITS, "the file belongs to the release"
    return tuple(words)


def compute_certificate_phrase(pem: str) -> str:
    """Return the phrase of a certificate's public key, such as ``garden copper winter, salmon ticket oval``.

    Args:
        pem: The certificate; the first one counts if there are several.

    Raises:
        ValueError: If the text is not a certificate.
    """
    return _compute_phrase(_encode_certificate_key(pem))


def compute_public_key_phrase(line: str) -> str:
    """Return the phrase of a site's public key, given as one OpenSSH line; the comment does not matter.

    Raises:
        ValueError: If the line is not an OpenSSH public key.
    """
    return _compute_phrase(_encode_key(serialization.load_ssh_public_key(line.encode())))


def compute_certificate_key_hash(pem: str) -> str:
    """Return the SHA-256 (64 hexadecimal digits) of a certificate's public key, for programs to compare.

    Args:
        pem: The certificate; the first one counts if there are several.

    Raises:
        ValueError: If the text is not a certificate.
    """
    return hashlib.sha256(_encode_certificate_key(pem)).hexdigest()


def find_phrase_difference(typed: str, phrase: str) -> str:
    """Return the difference between a phrase that a person typed and ``phrase``, as text; empty if there is none.

    Capitals, spaces and punctuation do not matter.
    """
    words = _split_words(typed)
    expected_words = _split_words(phrase)
    if len(words) != len(expected_words):
        return f"it has {format_count_with_noun(len(words), 'word')} instead of {len(expected_words)}"
    pairs = enumerate(zip(words, expected_words, strict=True), start=1)
    wrong = [
        f'word {number} is "{word}" instead of "{expected}"' for number, (word, expected) in pairs if word != expected
    ]
    return "; ".join(wrong)


def _split_words(text: str) -> list[str]:
    # NFKC makes wide letters of some input methods equal to ordinary letters.
    return re.findall(r"[^\W\d_]+", unicodedata.normalize("NFKC", text).casefold())


def _encode_certificate_key(pem: str) -> bytes:
    return _encode_key(x509.load_pem_x509_certificate(pem.encode()).public_key())


def _encode_key(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


@cache
def _compute_phrase(key: bytes) -> str:
    """Return the phrase of a public key (DER)."""
    size = -(-PHRASE_WORDS * WORD_BITS // 8)
    digest = Scrypt(_SALT, size, n=_SCRYPT_COST, r=_SCRYPT_BLOCK, p=_SCRYPT_LANES).derive(key)
    number = int.from_bytes(digest, "big")
    words = read_phrase_words()
    shifts = range(0, PHRASE_WORDS * WORD_BITS, WORD_BITS)
    chosen = [words[number >> shift & 2**WORD_BITS - 1] for shift in shifts]
    half = PHRASE_WORDS // 2
    return f"{' '.join(chosen[:half])}, {' '.join(chosen[half:])}"  # the comma marks a pause for reading aloud
