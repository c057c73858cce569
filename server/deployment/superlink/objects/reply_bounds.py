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
    """Most objects, most bytes in all of them, and most bytes of its arrays when they are put together."""

    objects: int
    size: int
    together: int

    @classmethod
    def on_reply_to(cls, sizes: Collection[int], together: int, asked_for: int = 0) -> "Bound":
        """The bound for a request whose objects have these sizes, and which asks for so many bytes by itself.

        Args:
            together: Bytes of its arrays, in which equal parts count each time.
        """
        chunks, more = -(-asked_for // CHUNK_BYTES), asked_for + MORE_BYTES
        return cls(len(sizes) + chunks + MORE_OBJECTS, sum(sizes) + more, together + more)

    def fault(self, objects: int, size: int) -> str:
        """Say why a reply is refused of which so much has come, or return an empty string."""
        if objects > self.objects:
            return f"its reply has {objects} parts; what was asked for has at most {self.objects}"
        return self.weighs_more if size > self.size else ""

    @property
    def weighs_more(self) -> str:
        """Why a reply is refused that is too large, as it comes or put together."""
        return f"its reply weighs more than {self.together / 1e6:.0f} MB, the most that what was asked for can weigh"


NOTHING = Bound(0, 0, 0)
"""On a reply to what nobody asked."""
