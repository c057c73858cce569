"""Limits of the size of each answer to a call, and of a whole message, that a site reads from the coordinator.

gRPC compares the limit with the length that an answer announces, and refuses a larger one before its content arrives.
The site accepts no compressed answer: no release of Polyclinic compresses, and 1 MB of gzip can contain 1 GB.

A message comes in many answers, so the sum of their sizes has another limit, which follows from the hospital's policy.
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
_SMALL_ANSWER_BYTES = 8 * 1024
"""Maximum size of an answer that contains only numbers and names."""
_ENVELOPE_BYTES = 2**20
"""Maximum size of a message's list of parts: 70 bytes for each part of 4 MiB, so a message of 60 GB fits."""
MAX_HEADER_BYTES = 8 * 1024
"""Maximum size of an answer's headers, and of its status with an error text."""
MAX_ANSWER_BYTES: Mapping[str, int] = {
    "ActivateNode": _SMALL_ANSWER_BYTES,
    "DeactivateNode": _SMALL_ANSWER_BYTES,
    "SendNodeHeartbeat": _SMALL_ANSWER_BYTES,
    "PullMessages": _ENVELOPE_BYTES + MAX_SMALL_OBJECTS_TOTAL_BYTES,
    "PushMessages": _ENVELOPE_BYTES,
    "GetRun": _SMALL_ANSWER_BYTES,
    "GetFab": BUNDLE_MAX_BYTES + _SMALL_ANSWER_BYTES,
    "PushObject": _SMALL_ANSWER_BYTES,
    "PullObject": MAX_CALL_BYTES,
    "ConfirmMessageReceived": _SMALL_ANSWER_BYTES,
    HELLO_METHOD: _SMALL_ANSWER_BYTES,
}
"""Fleet API call -> maximum size of its answer, in bytes."""
_SERVICES = {HELLO_METHOD: HELLO_SERVICE}

MEMORY_PER_MESSAGE_DIVISOR = 3
"""A message needs three times its size in memory: twice while its arrays are joined, once in the network."""
PARAMETER_BYTES = 8
"""Bytes for each parameter that the policy allows: 4 as float32, 4 for running statistics and a method's arrays."""
SPARE_BYTES = 64 * 2**20
"""Bytes of a message in addition to the model: a method's statistics, and encrypted shares of secure aggregation."""
MAX_SMALL_OBJECTS = 1000
"""Maximum number of a message's objects that are not parts of a large array; real messages have some dozens."""


def make_channel_options() -> list[tuple[str, int | str]]:
    """Return gRPC options that limit the size of every answer and of its headers, and refuse compressed answers."""
    methods = [
        {
            "name": [{"service": _SERVICES.get(call, FLEET_SERVICE), "method": call}],
            "maxResponseMessageBytes": limit,
        }
        for call, limit in MAX_ANSWER_BYTES.items()
    ]
    return [
        ("grpc.max_receive_message_length", max(MAX_ANSWER_BYTES.values())),
        ("grpc.service_config", json.dumps({"methodConfig": methods})),
        ("grpc.service_config_disable_resolution", 1),  # otherwise a DNS entry could replace the config
        ("grpc.compression_enabled_algorithms_bitset", 1),  # the lowest bit: no compression
        ("grpc.max_metadata_size", MAX_HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
    ]


@dataclass(frozen=True)
class MessageSizeBound:
    """The maximum size of a message that a site receives.

    Attributes:
        size: Maximum bytes of all objects of the message, and of all its arrays after their parts are joined.
        rule: The key of the policy from which ``size`` follows.
    """

    size: int
    rule: str

    @property
    def objects(self) -> int:
        """The maximum number of objects of a message."""
        return MAX_SMALL_OBJECTS + self.size // CHUNK_BYTES

    @property
    def reason(self) -> str:
        """The text with which a larger message is refused, for the coordinator and the site's log."""
        return f"the message is larger than {format_bytes(self.size)}, the most that {self.rule} allows"


def compute_message_size_bound(policy: SitePolicy) -> MessageSizeBound:
    """Return the limit that follows from a site's policy, or from the machine's memory if the policy has no number.

    A plan that the policy allows stays below this limit, because training takes at least five copies of the model.
    """
    gigabytes = policy.maximum_memory_gb
    if isinstance(gigabytes, float | int):
        memory = int(gigabytes * GB)
    else:
        memory = min(measure_physical_memory(), read_container_memory_limit())
    # However small the memory, a roll call must arrive, so that the coordinator learns the reason.
    bounds = [MessageSizeBound(max(memory // MEMORY_PER_MESSAGE_DIVISOR, SPARE_BYTES), "policy.maximum_memory_gb")]
    if policy.maximum_parameters is not None:
        size = PARAMETER_BYTES * policy.maximum_parameters + SPARE_BYTES
        bounds.append(MessageSizeBound(size, "policy.maximum_parameters"))
    return min(bounds, key=lambda bound: bound.size)


@dataclass
class ReceivedByteCount:
    """Thread-safe count of the bytes of one message while its objects arrive."""

    bound: MessageSizeBound
    _received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check_number_of_objects(self, objects: int) -> None:
        """Check the number of objects that a message announces.

        Raises:
            MessageTooLarge: If the number is above the limit.
        """
        if objects > self.bound.objects:
            most = f"a message of {format_bytes(self.bound.size)} has at most {self.bound.objects:,}"
            raise MessageTooLarge(f"the message announces {objects:,} parts, and {most} ({self.bound.rule})")

    def add_object(self, size: int) -> None:
        """Add an object's size to the count.

        Raises:
            MessageTooLarge: If the message is now larger than its bound.
        """
        with self._lock:
            self._received += size
            too_large = self._received > self.bound.size
        if too_large:
            raise MessageTooLarge(self.bound.reason)
