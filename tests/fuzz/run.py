"""Coverage-guided fuzzing of one target by atheris, from the root: ``python -m tests.fuzz.run TARGET SECONDS``.

Without words it prints the names of all targets.

Starts from the target's seeds; ends with the defect, whose input it leaves in a file that it names, or with 0 when the
time is over. Where atheris is not installed (``pip install polyclinic[fuzz]``; Linux on x86-64) it says so and ends.
"""

import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

NOT_THERE = 3
READERS = [
    "polyclinic.common.wire.codec",
    "polyclinic.common.wire.fleet_protocol",
    "polyclinic.common.wire.message_objects",
    "polyclinic.common.security.identity",
    "polyclinic.common.config",
    "polyclinic.data",
    "polyclinic.common.system.toml",
    "polyclinic.common.models.saved",
    "polyclinic.common.models.state",
    "polyclinic.strategies.engine.state",
    "polyclinic.server.federation.checkpoints",
    "polyclinic.server.coordinator.folder",
    "polyclinic.client.site.memory",
    "polyclinic.client.site.settings",
    "polyclinic.client.connection.fleet_client",
    "polyclinic.client.connection.service",
    "polyclinic.client.gate",
    "polyclinic.client.site.statements",
    "polyclinic.common.security.signatures",
    "polyclinic.common.wire.canonical_bytes",
    "tomllib",
    "json",
    "pydicom.filereader",
    "pydicom.encaps",
]
"""Modules whose branches guide the fuzzer."""


def main(name: str, seconds: int) -> None:
    """Fuzz one target for so long."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed here (pip install polyclinic[fuzz]; Linux on x86-64): nothing is fuzzed")
        sys.exit(NOT_THERE)
    import cryptography  # noqa: F401 - not to be instrumented

    with atheris.instrument_imports(include=READERS):
        from tests.fuzz.targets import TARGETS
    warnings.simplefilter("ignore")  # in a program they are no errors
    target = TARGETS[name]
    with TemporaryDirectory() as corpus:
        for place, seed in enumerate(target.seeds()):
            (Path(corpus) / f"seed{place}").write_bytes(seed)
        limits = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=4096", "-malloc_limit_mb=512"]
        atheris.Setup(["fuzz", corpus, "-max_len=65536", *limits], target.check)
        atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        from tests.fuzz.targets import TARGETS

        print(*TARGETS, sep="\n")
