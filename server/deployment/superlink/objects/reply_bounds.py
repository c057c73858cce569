"""What a reply may weigh: no more than what was asked for, and some room.

A reply to a model holds at most the groups and head rows that went down with it, the method's statistics and figures;
to a roll call, names and counts; a masked update is as long as its request says. So it has no more objects and bytes
than its request holds or asks for, but for the room left here. A single call is bounded by :data:`LARGEST_CALL`, in the
place of the 2 GiB of Flower 1.39.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from common.wire.fleet_protocol import CHUNK_BYTES

MORE_BYTES = 16 * 2**20
"""For statistics and figures, with the model's parts or without."""
MORE_OBJECTS = 8 + MORE_BYTES // CHUNK_BYTES
LARGEST_CALL = CHUNK_BYTES + 2**20
"""A chunk of an array, and room for what is around it: nothing else of a message is as large."""


def asked_for(content: Mapping[str, Any]) -> int:
    """Bytes that a request asks for which it does not hold itself: a masked update, under secure aggregation."""
    fields = content.get("fields")
    numbers = fields.get("numbers", 0) if isinstance(fields, Mapping) else 0
    return 4 * numbers if isinstance(numbers, int) else 0


@dataclass(frozen=True)
class Bound:
    """Most objects, and most bytes in all of them."""

    objects: int
    size: int

    @classmethod
    def on_reply_to(cls, sizes: Collection[int], asked_for: int = 0) -> "Bound":
        """The bound for a request whose objects have these sizes, and which asks for so many bytes by itself."""
        chunks = -(-asked_for // CHUNK_BYTES)
        return cls(len(sizes) + chunks + MORE_OBJECTS, sum(sizes) + asked_for + MORE_BYTES)

    def fault(self, objects: int, size: int) -> str:
        """Say why a reply is refused of which so much has come, or return an empty string."""
        if objects > self.objects:
            return f"its reply has {objects} parts; what was asked for has at most {self.objects}"
        if size > self.size:
            megabytes = self.size / 1e6
            return f"its reply weighs more than {megabytes:.0f} MB, the most that what was asked for can weigh"
        return ""
