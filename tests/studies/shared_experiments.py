"""An experiment that somebody hands out, and how a program on it ended."""

from dataclasses import dataclass

PROGRAM = "import sys; from polyclinic.studies.cli import main; main(sys.argv[1:])"
STOPPED = 2
EXPERIMENT = """\
[run]
method = "fedavg"
rounds = 1
[model]
architecture = "tiny_cnn"
channels = 1
image_size = 16
[simulation]
backend = "inline"
[partition]
kind = "class_lists"
[partition.lists]
east = ["Mass", "Fluid"]
"""
DIGITS = (
    EXPERIMENT.replace('["Mass", "Fluid"]', str([str(number) for number in range(10)]))
    + '[data]\nkind = "digits"\nimage_size = 16\n'
)


@dataclass
class Ended:
    """How a program ended."""

    code: int
    text: str
