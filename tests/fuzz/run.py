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
READERS = (
    *(f"common.wire.{name}" for name in ("codec", "quantization", "fleet_protocol", "flower_objects")),
    *("common.security.identity", "common.config", "common.data"),
    *(
        "common.system.toml",
        "common.models.saved",
        "common.models.state",
        "strategies.engine.state",
        "server.federation.checkpoints",
    ),
    *(
        "server.coordinator.folder",
        "client.site.memory",
        "client.connection.pending_message",
        "client.site.settings",
        "client.connection.fleet_client",
    ),
    *("tomllib", "json", "pydicom.filereader", "pydicom.encaps"),
)
"""Whose branches guide it."""


def main(name: str, seconds: int) -> None:
    """Fuzz one target for so long."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed here (pip install polyclinic[fuzz]; Linux on x86-64): nothing is fuzzed")
        sys.exit(NOT_THERE)
    import cryptography  # noqa: F401 - not to be instrumented

    with atheris.instrument_imports(include=list(READERS)):
        from tests.fuzz.targets import TARGETS
    warnings.simplefilter("ignore")  # in a program they are no errors
    target = TARGETS[name]
    with TemporaryDirectory() as corpus:
        for place, seed in enumerate(target.seeds()):
            (Path(corpus) / f"seed{place}").write_bytes(seed)
        limits = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=4096", "-malloc_limit_mb=512"]
        atheris.Setup(["fuzz", corpus, "-max_len=65536", *limits], target.tried)
        atheris.Fuzz()


def names() -> None:
    """Print the names of all targets."""
    from tests.fuzz.targets import TARGETS

    print(*TARGETS, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else names()
