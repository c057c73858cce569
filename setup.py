"""What ``pyproject.toml`` cannot say: the experiments that need no files travel in the wheel, beside ``polyclinic``."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
TRAVELS = ("digits_surgical.toml", "digits_vanilla.toml", "flower-quickstart")


class WithExperiments(build_py):
    """Copies them at build time; an editable installation reads the checkout's own."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        goal = Path(self.build_lib, "polyclinic", "experiments")
        shutil.rmtree(goal, ignore_errors=True)
        goal.mkdir(parents=True)
        for name in TRAVELS:
            source = ROOT / "experiments" / name
            if source.is_dir():
                shutil.copytree(source, goal / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, goal / name)


setup(cmdclass={"build_py": WithExperiments})
