"""The largest answers that a site reads: of each call to the coordinator, and of a whole message.

gRPC compares a bound with the length that an answer announces, and refuses a larger one before its content arrives. It
takes no compressed answer at all: no release of Polyclinic compresses, and a megabyte of gzip can hold a gigabyte.

A message comes in many answers, so its sum has a bound of its own, by the hospital's policy.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.system.plain_text import format_bytes
from polyclinic.common.system.resources import measure_physical_memory, read_container_memory_limit
from polyclinic.common.wire.fleet_protocol import (
    CHUNK_BYTES,
    FLEET_SERVICE,
    HELLO_METHOD,
    HELLO_SERVICE,
    MAX_CALL_BYTES,
    MAX_SMALL_OBJECTS_TOTAL_BYTES,
)
from polyclinic.common.wire.message_objects import MessageTooLarge

GB = 10**9
BUNDLE_MAX_BYTES = 64 * 1024
_BARE = 8 * 1024
"""Bytes of an answer that has numbers and names only."""
_ENVELOPE = 2**20
"""Bytes of a message's envelope: 70 for the name of each part of 4 MiB, so a message of 60 GB fits."""
LARGEST_HEADERS = 8 * 1024
"""Bytes of an answer's headers, and of its status with the reason of an error."""
ANSWER_BYTES: Mapping[str, int] = {
    "ActivateNode": _BARE,
    "DeactivateNode": _BARE,
    "SendNodeHeartbeat": _BARE,
    "PullMessages": _ENVELOPE + MAX_SMALL_OBJECTS_TOTAL_BYTES,
    "PushMessages": _ENVELOPE,
    "GetRun": _BARE,
    "GetFab": BUNDLE_MAX_BYTES + _BARE,
    "PushObject": _BARE,
    "PullObject": MAX_CALL_BYTES,
    "ConfirmMessageReceived": _BARE,
    HELLO_METHOD: _BARE,
}
"""Call -> bytes of its largest answer."""
_SERVICES = {HELLO_METHOD: HELLO_SERVICE}

SHARE_OF_MEMORY = 3
"""A message takes its size twice while its arrays are joined, and a model of it once more in the network."""
PARAMETER_BYTES = 8
"""Bytes for each parameter that the policy allows: float32, and as much again for running statistics and what a method
sends beside the model."""
SPARE_BYTES = 64 * 2**20
"""Bytes of a message beside the model of a small network: statistics of a method, and letters of secure aggregation."""
SMALL_OBJECTS = 1000
"""Objects of a message that are no parts of a large array; ours have some dozens."""


def make_channel_options() -> list[tuple[str, int | str]]:
    """Return gRPC options that bound every answer: its size by the call, its headers, and that it is not compressed."""
    methods = [
        {
            "name": [{"service": _SERVICES.get(call, FLEET_SERVICE), "method": call}],
            "maxResponseMessageBytes": most,
        }
        for call, most in ANSWER_BYTES.items()
    ]
    return [
        ("grpc.max_receive_message_length", max(ANSWER_BYTES.values())),
        ("grpc.service_config", json.dumps({"methodConfig": methods})),
        ("grpc.service_config_disable_resolution", 1),  # else an entry of the DNS could bring another one
        ("grpc.compression_enabled_algorithms_bitset", 1),  # the lowest bit: no compression
        ("grpc.max_metadata_size", LARGEST_HEADERS),
        ("grpc.absolute_max_metadata_size", LARGEST_HEADERS),
    ]


@dataclass(frozen=True)
class MessageSizeBound:
    """The largest message that a site receives.

    Attributes:
        size: Bytes of all its objects as they travel, and at most as many of its arrays after their parts are joined.
        rule: The key of the policy from which ``size`` follows.
    """

    size: int
    rule: str

    @property
    def objects(self) -> int:
        """The largest number of objects."""
        return SMALL_OBJECTS + self.size // CHUNK_BYTES

    @property
    def reason(self) -> str:
        """The reason for the coordinator and for the site's log to refuse a larger message."""
        return f"the message is larger than {format_bytes(self.size)}, the most that {self.rule} allows"


def compute_message_size_bound(policy: SitePolicy) -> MessageSizeBound:
    """Return the bound that follows from a site's policy, or from the machine's memory if the policy has no number.

    A plan that the policy allows stays below it: training takes five copies of the model and more.
    """
    gigabytes = policy.maximum_memory_gb
    if isinstance(gigabytes, float | int):
        memory = int(gigabytes * GB)
    else:
        memory = min(measure_physical_memory(), read_container_memory_limit())
    # However small the memory, a roll call must arrive, so that the coordinator learns the reason.
    bounds = [MessageSizeBound(max(memory // SHARE_OF_MEMORY, SPARE_BYTES), "policy.maximum_memory_gb")]
    if policy.maximum_parameters is not None:
        size = PARAMETER_BYTES * policy.maximum_parameters + SPARE_BYTES
        bounds.append(MessageSizeBound(size, "policy.maximum_parameters"))
    return min(bounds, key=lambda bound: bound.size)


@dataclass
class ReceivedByteCount:
    """Counts the bytes of one message while its objects arrive, also in several threads."""

    bound: MessageSizeBound
    _received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check_number_of_objects(self, objects: int) -> None:
        """Raise :class:`MessageTooLarge` if a message announces too many objects."""
        if objects > self.bound.objects:
            most = f"a message of {format_bytes(self.bound.size)} has at most {self.bound.objects:,}"
            raise MessageTooLarge(f"the message announces {objects:,} parts, and {most} ({self.bound.rule})")

    def add_object(self, size: int) -> None:
        """Count an object.

        Raises:
            MessageTooLarge: If the message is now larger than its bound.
        """
        with self._lock:
            self._received += size
            too_large = self._received > self.bound.size
        if too_large:
            raise MessageTooLarge(self.bound.reason)
