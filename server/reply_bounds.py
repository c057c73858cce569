"""What a reply may weigh: no more than what was asked for, and some room.

A reply to a model holds at most the groups and head rows that went down with it, the method's statistics and figures;
to a roll call, names and counts. So it has no more objects and bytes than its request, but for the room left here. A
single call is bounded by :data:`LARGEST_CALL`, in the place of the 2 GiB of Flower 1.39.
"""

from collections.abc import Collection
from dataclasses import dataclass

MORE_BYTES = 16 * 2**20
"""For statistics and figures, with the model's parts or without."""
MORE_OBJECTS = 8
LARGEST_CALL = 64 * 2**20
"""Four chunks of an array."""


@dataclass(frozen=True)
class Bound:
    """Most objects, and most bytes in all of them."""

    objects: int
    size: int

    @classmethod
    def on_reply_to(cls, sizes: Collection[int]) -> "Bound":
        """The bound for a request whose objects have these sizes."""
        return cls(len(sizes) + MORE_OBJECTS, sum(sizes) + MORE_BYTES)

    def fault(self, objects: int, size: int) -> str:
        """Say why a reply is refused of which so much has come, or return an empty string."""
        if objects > self.objects:
            return f"its reply has {objects} parts; what was asked for has at most {self.objects}"
        if size > self.size:
            megabytes = self.size / 1e6
            return f"its reply weighs more than {megabytes:.0f} MB, the most that what was asked for can weigh"
        return ""
