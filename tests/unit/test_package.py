"""The wheel: it builds, holds what it should, and works outside the repository; `make test-wheel` installs it."""

import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import install_wheel
import pytest

import entmtp
from entmtp import config
from entmtp.__main__ import COMMANDS, main
from entmtp.config import choices
from entmtp.errors import EntmtpError

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/entmtp"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return install_wheel.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """run(*arguments): Python outside the repository, with the unpacked wheel before anything else on its path."""
    packages, elsewhere = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("elsewhere")
    zipfile.ZipFile(wheel).extractall(packages)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *arguments], cwd=elsewhere, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"})  # fmt: skip

    run.packages = packages
    return run


def test_the_wheel_holds_the_whole_package_and_the_configuration_and_nothing_else(wheel):
    assert wheel.name == f"entmtp-{entmtp.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {path.relative_to(ROOT / "src").as_posix() for path in package}
    for name, source in {"conf": "conf", "schemas": "workflow/schemas", "captions": "workflow/report",
                         "reproduction": "docs/reproduction"}.items():  # fmt: skip
        files = [path for path in (ROOT / source).rglob("*") if path.is_file()]
        expected |= {f"entmtp/{name}/{path.relative_to(ROOT / source).as_posix()}" for path in files}
    expected.add("entmtp/CITATION.cff")
    assert {
        "entmtp/target/engine/native.c",
        "entmtp/conf/config.yaml",
        "entmtp/conf/policy/entmtp_tau.yaml",
        "entmtp/schemas/summary.schema.json",
    } <= expected
    info = f"entmtp-{entmtp.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == expected


def test_its_metadata(wheel):
    info = f"entmtp-{entmtp.__version__}.dist-info"
    archive = zipfile.ZipFile(wheel)
    assert archive.read(f"{info}/entry_points.txt").decode().split() == [
        "[console_scripts]", "entmtp", "=", "entmtp.__main__:main"
    ]  # fmt: skip
    metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert metadata["Version"] == entmtp.__version__
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert "torch==2.13.0" in needed and not [line for line in needed if line.startswith(("pytest", "mkdocs"))]
    assert set(metadata.get_all("Provides-Extra")) >= {"dev", "harness", "docs", "coverage"}


def test_installed_alone_the_command_says_its_version(wheel, tmp_path):
    """-S: without site-packages, so without torch, numpy or anything else."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from entmtp.__main__ import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"entmtp {entmtp.__version__}"), done.stderr


def test_outside_the_repository_the_command_line_knows_the_configuration(installed):
    done = installed("-m", "entmtp", "generate", "--help")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for group in ("policy", "task", "experiment") for name in choices(group))
    where = installed("-c", "from entmtp.config import CONF; print(CONF)")
    assert where.stdout.strip() == str(installed.packages / "entmtp/conf"), where.stderr


RECORDS = """
from entmtp.errors import EntmtpError
from entmtp.evaluation.cite import read_citation
from entmtp.evaluation.page import read_captions
from entmtp.evaluation.schema import check_schema
from entmtp.provenance import git_state
from entmtp.reproduction import record_path

assert read_captions(["speedup"]) and read_citation() and record_path("quick").is_file()
try:
    check_schema({}, "summary")
except EntmtpError as error:
    print(error)
print(git_state())
"""


def test_outside_the_repository_records_are_checked_and_no_foreign_commit_is_named(installed):
    subprocess.run(["git", "init", "-q", str(installed.packages)], check=True)  # another project's checkout
    done = installed("-c", RECORDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "summary.json, $: " in done.stdout and "is a required property" in done.stdout
    assert done.stdout.strip().endswith("{'sha': None, 'dirty': None}")


def test_outside_the_repository_the_library_drafts_and_writes_plain_decodings_tokens(installed):
    """`make test-wheel`'s own example: load, generate, and the same tokens as without drafts."""
    done = installed("-c", install_wheel.EXAMPLE, str(installed.packages))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "24 tokens, those of plain decoding" in done.stdout


def test_the_command_lists_the_others(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--version", "python -m entmtp.generate", "from entmtp import load, generate"))
    assert all(f"  {name} " in text for name in COMMANDS)


def test_every_module_with_a_command_line_is_listed():
    """But for the worker of peers.bench and what runs in the sandbox, which nobody calls by hand."""
    runnable = {path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".")
                for path in SOURCE.rglob("*.py") if '__name__ == "__main__"' in path.read_text()}  # fmt: skip
    hidden = {"__main__", "peers.worker", "evaluation.jail", "evaluation.runner"}
    assert {module for module, _ in COMMANDS.values()} == runnable - hidden


def test_a_command_gets_its_arguments_and_gives_its_status(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["entmtp"])
    with pytest.raises(SystemExit) as ended:
        main(["verify-reproduction", "policy=ar", "experiment=nowhere"])
    assert str(ended.value).startswith("error: unknown experiment 'nowhere': choose one of ")
    with pytest.raises(SystemExit) as ended:
        main(["bench-engine", "--help"])
    assert ended.value.code == 0 and "how far our forwards are from what this machine can do" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generat"])
    assert ended.value.code == 2
    assert "'generat'" in (said := capsys.readouterr().err) and "verify-reproduction" in said


def test_an_installation_without_its_configuration_is_said_to_be_incomplete(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "CONF", tmp_path / "conf")
    with pytest.raises(EntmtpError, match=r"no configuration in .* is incomplete; install its wheel again"):
        config.compose(["policy=ar"])


def test_the_lock_with_hashes_is_the_lock():
    text = (ROOT / "requirements-hashes.lock").read_text().replace(" \\\n", " ")
    entries = [line.split() for line in text.splitlines() if not line.startswith("#")]
    pins = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert [entry[0] for entry in entries] == pins, "make lock-hashes"
    hashes = [value for entry in entries for value in entry[1:]]
    assert all(len(entry) > 1 for entry in entries)
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", value) for value in hashes)
    assert len(set(hashes)) == len(hashes)
