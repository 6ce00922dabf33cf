"""`python -m entmtp.archive experiment=main`: a finished run as one folder to keep or to hand on, with a manifest.

Everything that the run left under `results/<experiment>` is copied to `archives/<experiment>-<date>-<commit>`: prompts,
texts, traces, trees, policies, timed rows, checks, tables, figures, report. Left out are hidden states that heads were
trained on (`heads/features`: gigabytes that the texts give again) and what an interrupted job keeps. `manifest.json`
names every file with its size and SHA-256, and where the run comes from; the environment's lock lies beside it.

    python -m entmtp.archive experiment=main
    python -m entmtp.archive --check archives/main-2026-11-30-72460a1

The second form reads an archive again: exit status 0 when every file is there and as it was, and none is more.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from entmtp.command import run_command
from entmtp.config import PACKAGE, compose
from entmtp.errors import EntmtpError
from entmtp.io import check_name, read_json, sha256_file, write_json
from entmtp.layout import run_folder

MANIFEST = "manifest.json"
FORMAT = "entmtp-archive-1"
LEFT_OUT = ("heads/features/*", "*.journal", "*.journal.jsonl", "*checkpoint.pt", "*.failed.json", ".*", "*/.*")
BESIDE = ("requirements.lock", "CITATION.cff", "LICENSE")  # of the checkout, where there is one


def run_files(run: Path) -> list[str]:
    """Files of a run that are worth keeping, relative to it, in order."""
    found = [Path(folder) / name for folder, _, names in os.walk(run, followlinks=True) for name in names]
    names = sorted(path.relative_to(run).as_posix() for path in found if path.is_file())
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in LEFT_OUT)]


def make_archive(run: Path, folder: Path) -> Path:
    """Copy a finished run into `folder`, whole or not at all. Raises EntmtpError where the run is not finished or
    the folder cannot be made."""
    if not (run / "summary.json").is_file():
        raise EntmtpError(f"{run}/summary.json: no such file; finish the run first (`snakemake --cores all`)")
    provenance = read_json(run / "summary.json")["provenance"]
    for name, expected in provenance.get("timed_sha256", {}).items():
        if not (run / name).is_file() or sha256_file(run / name) != expected:
            raise EntmtpError(f"{run / name}: not the file that {run}/summary.json was made from; finish the run again "
                              "(`snakemake --cores all`)")  # fmt: skip
    target = folder / archive_name(run.name, provenance)
    if target.exists():
        raise EntmtpError(f"{target}: this run has been archived already; remove it to archive it again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{target.name}.") as work:
            made = Path(work) / "archive"
            files = [_copy(run / name, made, f"run/{name}") for name in run_files(run)]
            checkout = PACKAGE.parents[1]
            files += [_copy(checkout / name, made, name) for name in BESIDE if (checkout / name).is_file()]
            record = {"format": FORMAT, "experiment": run.name, "provenance": provenance, "files": files}
            write_json(made / MANIFEST, record)
            os.replace(made, target)
    except OSError as error:
        raise EntmtpError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def archive_name(experiment: str, provenance: dict) -> str:
    """`<experiment>-<date of the summary>-<commit>`."""
    commit = str(provenance["git"]["sha"] or "no-commit")[:7]
    return check_name("archive", f"{experiment}-{provenance['date'][:10]}-{commit}")


def _copy(source: Path, folder: Path, name: str) -> dict:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, folder / name)
    return {"path": name, "bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}


def differences(folder: Path) -> Iterator[str]:
    """A line for every file that is missing, changed, or not in the manifest. Raises EntmtpError for no archive."""
    record = read_json(folder / MANIFEST)
    try:
        if record["format"] != FORMAT:
            raise EntmtpError(f"{folder / MANIFEST}: this version reads format '{FORMAT}', not '{record['format']}'")
        known = {entry["path"]: (entry["bytes"], entry["sha256"]) for entry in record["files"]}
    except (KeyError, TypeError) as error:
        raise EntmtpError(f"{folder / MANIFEST}: not a manifest of an archive ({error!r})") from error
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    for name in sorted({*known, *there}):
        if name not in there:  # also what leads out of the folder: it is no file in it
            yield f"missing: {name}"
        elif name not in known:
            yield f"not in the manifest: {name}"
        elif ((folder / name).stat().st_size, sha256_file(folder / name)) != known[name]:
            yield f"changed: {name}"


def main(arguments: list[str]) -> int:
    """Exit status 0; with `--check FOLDER` 1 where the folder differs from its manifest."""
    if "--check" in arguments:
        folders = [Path(item) for item in arguments if item != "--check"]
        if len(folders) != 1:
            raise EntmtpError("--check takes one folder: python -m entmtp.archive --check archives/<name>")
        found = list(differences(folders[0]))
        print("\n".join(found) or f"{folders[0]}: every file is as its manifest says")
        return int(bool(found))
    made = make_archive(run_folder(compose(arguments)), Path("archives"))
    record = read_json(made / MANIFEST)
    size = sum(entry["bytes"] for entry in record["files"])
    print(f"{made}: {len(record['files'])} files, {size / 1e6:.1f} MB, manifest {sha256_file(made / MANIFEST)}")
    return 0


if __name__ == "__main__":
    run_command(main, __doc__)
