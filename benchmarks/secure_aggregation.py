"""What secure aggregation costs: processor seconds of a site and of the coordinator, and bytes, for one round.

python benchmarks/secure_aggregation.py [--out FILE]

Both halves as they run in a federation, in one process and without a network; training is not part of it.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.common.models.network import Head
from polyclinic.common.wire.codec import AnyRecord, count_payload_bytes, decode_record, encode_record
from polyclinic.common.wire.records import ModelGroups, Record
from polyclinic.common.wire.secure_aggregation import KeysRequest, MaskedRequest, RevealRequest, SharesRequest
from polyclinic.strategies.privacy.secure_aggregation.coordinator import MaskedSummation, MaskedSumRequest
from polyclinic.strategies.privacy.secure_aggregation.site import MaskingConditions, SiteMaskingRound
from polyclinic.strategies.privacy.secure_aggregation.vectors import UpdateVectorLayout

CLASSES = tuple(f"class {number:02}" for number in range(14))
SIZES = {"tiny_cnn": (50_000, 64), "ResNet-18": (11_170_000, 512)}
ROUND = ("bench", 1)


@dataclass
class Meter:
    """Sites that answer in this process; what it took each.

    Attributes:
        cpu_s: Of all sites.
        up, down: Bytes of all sites' answers and questions.
    """

    sites: Mapping[str, SiteMaskingRound]
    cpu_s: float = 0.0
    up: int = 0
    down: int = 0

    def __call__(
        self, requests: Mapping[str, Record], expected: type[AnyRecord], enough: int
    ) -> Iterator[tuple[str, AnyRecord]]:
        for site, request in requests.items():
            self.down += count_payload_bytes(encode_record(request))
            began = time.process_time()
            answer = encode_record(_answer(self.sites[site])[type(request)](request))
            self.cpu_s += time.process_time() - began
            self.up += count_payload_bytes(answer)
            yield site, decode_record(answer, expected)


def _answer(site: SiteMaskingRound) -> Mapping[type, Callable[[Any], Any]]:
    return {
        KeysRequest: site.answer_with_keys,
        SharesRequest: site.answer_with_shares,
        MaskedRequest: site.answer_with_masked_update,
        RevealRequest: site.answer_with_revealed_shares,
    }


def rows_of(site: int) -> tuple[str, ...]:
    """Seven classes of fourteen, other ones at each site; each class has several owners."""
    return tuple(sorted(CLASSES[(site + step * 2) % len(CLASSES)] for step in range(7)))


def measure(trunk: int, features: int, sites: int) -> tuple[float, float, float, float]:
    """Seconds of a site and of the coordinator, kilobytes up and down of a site beyond the update itself."""
    names = [f"site {number:02}" for number in range(sites)]
    rows = {name: rows_of(number) for number, name in enumerate(names)}
    random = np.random.default_rng(0)
    numbers = random.normal(0, 1e-3, trunk).astype(np.float32)
    own = Head(CLASSES[:7], random.normal(0, 1e-3, (7, features)).astype(np.float32), np.zeros(7, np.float32))
    began = time.process_time()
    rounds = {
        name: SiteMaskingRound(
            *ROUND, name, ModelGroups(numbers, None, Head(rows[name], own.weight, own.bias)), MaskingConditions(16.0)
        )
        for name in names
    }
    held = time.process_time() - began
    meter = Meter(rounds)
    layout = UpdateVectorLayout(trunk, 0, features)
    options = MaskedSumRequest(*ROUND, rows, CLASSES, layout, 16.0)
    began = time.process_time()
    MaskedSummation(options, meter).unmask_sum()
    coordinator = time.process_time() - began - meter.cpu_s
    bare = 4 * layout.compute_vector_size(rows[names[0]])
    return (held + meter.cpu_s) / sites, coordinator, (meter.up / sites - bare) / 1e3, meter.down / sites / 1e3


def main() -> None:
    """Print a row for each size and number of sites."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments, rows = parser.parse_args(), []
    print("| model | sites | CPU s of a site | CPU s of the coordinator | kB up beside the update | kB down |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (trunk, features) in SIZES.items():
        for sites in (4, 12):
            site_s, coordinator_s, up, down = measure(trunk, features, sites)
            of = {"site_s": site_s, "coordinator_s": coordinator_s, "up_kb": up, "down_kb": down}
            rows.append({"model": name, "sites": sites, **of})
            print(f"| {name} | {sites} | {site_s:.2f} | {coordinator_s:.2f} | {up:.1f} | {down:.1f} |")
    if arguments.out:
        arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
