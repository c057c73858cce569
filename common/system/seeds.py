"""One seed for each purpose, derived from what it is for: never from a clock, never from who came first."""

import hashlib


def seed_of(*parts: object) -> int:
    """Derive a 63-bit seed from, for instance, (run seed, round, site, "order")."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
