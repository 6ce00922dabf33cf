"""What pyproject.toml cannot say: conf/ lies beside `src` in a checkout, and inside the package in a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfiguration(build_py):
    """Copies conf/ to entmtp/conf. An editable install reads the checkout's own."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copy = Path(self.build_lib, "entmtp", "conf")
            shutil.rmtree(copy, ignore_errors=True)  # of an earlier build
            shutil.copytree("conf", copy)


setup(cmdclass={"build_py": BuildWithConfiguration})
