"""Puts into a wheel what Flower needs of a checkout beside its code; all else about it is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithProject(build_py):
    """Copies the project's own files to where `appa_flwr.launch.bundle.project_file` looks for them."""

    def run(self) -> None:
        """Build the packages, then add the files, but where a checkout is installed as it stands."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "appa_flwr" / "project"
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("pyproject.toml", "README.md", "LICENSE"):
                shutil.copyfile(name, folder / name)


setup(cmdclass={"build_py": WithProject})
