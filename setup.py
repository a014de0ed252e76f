"""Puts into a wheel what Flower's app folder has beside the code; all else about the wheel is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithProject(build_py):
    """Copies the project's files to the folder that `appa_flwr.launch.bundle` reads in an installed package."""

    def run(self) -> None:
        """Build the packages, and add the files unless the install is editable."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "appa_flwr" / "project"
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("pyproject.toml", "README.md", "LICENSE"):
                shutil.copyfile(name, folder / name)


setup(cmdclass={"build_py": WithProject})
