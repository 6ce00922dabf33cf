"""What pyproject.toml cannot say: what lies beside `src` in a checkout, and inside the package in a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# in the package (entmtp.config.shipped reads them there): in the checkout
SHIPPED = {"conf": "conf", "schemas": "workflow/schemas", "captions": "workflow/report", "CITATION.cff": "CITATION.cff",
           "reproduction": "docs/reproduction"}  # fmt: skip


class BuildWithFiles(build_py):
    """Copies them. An editable install reads the checkout's own."""

    def run(self) -> None:
        super().run()
        for name, source in {} if self.editable_mode else SHIPPED.items():
            copy = Path(self.build_lib, "entmtp", name)
            if Path(source).is_dir():
                shutil.rmtree(copy, ignore_errors=True)  # of an earlier build
                shutil.copytree(source, copy)
            else:
                shutil.copyfile(source, copy)


setup(cmdclass={"build_py": BuildWithFiles})
