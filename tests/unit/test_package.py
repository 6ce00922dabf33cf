"""The wheel: it builds, holds what it should, and its command runs without a single dependency."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import entmtp
from entmtp import config
from entmtp.__main__ import main
from entmtp.errors import EntmtpError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources, so that the checkout stays as it is."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--no-build-isolation", "--wheel-dir", str(made), str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(made.glob("*.whl"))


def test_the_wheel_holds_every_module_and_the_pages(wheel):
    assert wheel.name == f"entmtp-{entmtp.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/entmtp").rglob("*.py")}
    assert modules <= names
    pages = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/entmtp/evaluation/pages").iterdir()}
    assert len(pages) >= 6 and pages <= names
    packages = {name.split("/")[0] for name in names}
    assert packages == {"entmtp", f"entmtp-{entmtp.__version__}.dist-info"}, "nothing but the package"


def test_its_metadata(wheel):
    info = f"entmtp-{entmtp.__version__}.dist-info"
    archive = zipfile.ZipFile(wheel)
    assert archive.read(f"{info}/entry_points.txt").decode().split() == [
        "[console_scripts]", "entmtp", "=", "entmtp.__main__:main"
    ]  # fmt: skip
    metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert metadata["Version"] == entmtp.__version__
    assert "torch==2.13.0" in metadata.get_all("Requires-Dist")


def test_installed_alone_the_command_says_its_version(wheel, tmp_path):
    """-S: without site-packages, so without torch, numpy or anything else."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from entmtp.__main__ import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"entmtp {entmtp.__version__}"), done.stderr


def test_the_command_lists_the_others(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--version", "python -m entmtp.generate", "from entmtp import load, generate"))


def test_outside_a_checkout_the_configuration_is_said_to_be_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "CONF", tmp_path / "conf")
    with pytest.raises(EntmtpError, match=r"in a checkout of the repository .* `from entmtp import load, generate`"):
        config.compose(["policy=ar"])
