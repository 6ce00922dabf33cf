"""`make lock-hashes`: requirements.lock with the SHA-256 of each file that pip installs, as requirements-hashes.lock.

pip resolves the lock twice without installing anything: as this machine is configured, and from the index alone.
Where the two differ (torch's builds for CPUs and for GPUs) both files are allowed. Only files of this platform are
listed: the header says which it is.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL")


def resolve(environment: dict[str, str]) -> dict[str, str]:
    """{normalised name: SHA-256} of what pip would install for the lock."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
               "--report", "-", "--requirement", str(ROOT / "requirements.lock")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"error: pip cannot resolve requirements.lock: {done.stderr[-1000:]}")
    entries = json.loads(done.stdout)["install"]
    return {normal(entry["metadata"]["name"]): digest(entry["download_info"]) for entry in entries}


def digest(download: dict) -> str:
    known = download["archive_info"].get("hashes", {}).get("sha256")
    if known:
        return known
    path = Path(unquote(urlsplit(download["url"]).path))  # a file of this machine, of which no index told the hash
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    plain = {key: value for key, value in os.environ.items() if key not in SOURCES}
    found = [resolve(dict(os.environ)), resolve({**plain, "PIP_CONFIG_FILE": os.devnull})]
    lines = [f"# requirements.lock with hashes, for {platform.system()} {platform.machine()} and Python "
             f"{'.'.join(platform.python_version_tuple()[:2])}. Made by `make lock-hashes`."]  # fmt: skip
    for pin in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if not pin.startswith("#"):
            name = normal(pin.partition("==")[0])
            hashes = sorted({resolved[name] for resolved in found})
            lines.append(" \\\n".join([pin, *(f"    --hash=sha256:{value}" for value in hashes)]))
    partial = ROOT / "requirements-hashes.lock.partial"
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(ROOT / "requirements-hashes.lock")


if __name__ == "__main__":
    main()
