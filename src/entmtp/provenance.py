"""Where a result comes from: code, configuration, versions, machine."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from entmtp import __version__
from entmtp.io import sha256_file, sha256_json

DECODING = ("decoding", "heads", "policy", "target", "tree")  # packages whose code runs while tokens are timed
SOURCES = (".py", ".c", ".h")
PACKAGES = ("torch", "transformers", "numpy", "pandas", "snakemake", "hydra-core")


def git_state() -> dict:
    """Commit and whether the working tree differs from it; None outside a checkout."""
    package = Path(__file__).resolve().parent
    root = package.parents[1]
    if package != root / "src" / "entmtp":  # installed, perhaps into another project's checkout
        return {"sha": None, "dirty": None}

    def git(*args: str) -> str | None:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    sha = git("rev-parse", "HEAD")
    return {"sha": sha, "dirty": bool(git("status", "--porcelain", "--untracked-files=no")) if sha else None}


def decoding_code() -> str:
    """SHA-256 of the code that decodes: a timed run that was interrupted goes on under the same code only."""
    package = Path(__file__).resolve().parent
    files = [path for part in DECODING for path in sorted((package / part).rglob("*")) if path.suffix in SOURCES]
    return sha256_json([[str(path.relative_to(package)), sha256_file(path)] for path in files])


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return cpu_name()
    import torch

    return torch.cuda.get_device_name(device)


def provenance(config: dict, **extra: object) -> dict:
    """A JSON-ready record; `config` is the resolved configuration, `extra` what the caller knows (prompt hashes, …)."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "entmtp": __version__,
        "git": git_state(),
        "config_sha256": sha256_json(config),
        "experiment": config.get("experiment"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": versions,
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "device": device_name(config.get("device", "cpu")),
        "dtype": config.get("dtype"),
        "threads": torch.get_num_threads(),
        **extra,
    }
