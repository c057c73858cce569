"""What ``pyproject.toml`` cannot say: the experiments that need no files travel in the wheel, beside ``polyclinic``."""

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
EXAMPLES = runpy.run_path(str(ROOT / "polyclinic" / "examples.py"))


class WithExperiments(build_py):
    """Copies them at build time; an editable installation reads the checkout's own."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        goal = Path(self.build_lib, "polyclinic", "experiments")
        shutil.rmtree(goal, ignore_errors=True)
        EXAMPLES["copy_examples"](ROOT / "experiments", goal)


setup(cmdclass={"build_py": WithExperiments})
