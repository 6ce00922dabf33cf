"""Files between stages: written whole or not at all, read with messages that name the place of an error."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from entmtp.errors import EntmtpError


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; rename it to `path` only when the block ends without an error."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EntmtpError(f"cannot create folder {path.parent}: {error.strerror}; choose a writable one") from error
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk in its own type
        raise EntmtpError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def folder_atomic(folder: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`, which takes its place only when the block ends without an error.

    Its parent is temporary too: room for what shall not stay.
    """
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as work:
            made = Path(work) / "made"
            made.mkdir()
            yield made
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(made, folder)
    except (OSError, SafetensorError) as error:
        inside = f" ({error.filename})" if getattr(error, "filename", None) else ""
        raise EntmtpError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}{inside}") from error


@contextmanager
def alone(path: str | Path) -> Iterator[bool]:
    """Hold the lock file `path` while the block runs: other processes wait. A killed one holds none. Yields False on a
    file system without locks, where nobody waits."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise EntmtpError(f"cannot write {path}: {error.strerror or error}; choose another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held


def read_safetensors(path: str | Path) -> dict[str, Any]:
    """All tensors of a safetensors file."""
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise EntmtpError(f"{path}: not a whole safetensors file ({error})") from error


def _reason(error: OSError) -> str:
    return "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error))


def write_text(path: str | Path, text: str) -> None:
    with atomic(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write readable JSON. NaN and infinity are refused: they are not JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise EntmtpError(f"{path}: {_reason(error)}") from error
    except (ValueError, RecursionError) as error:  # broken, not UTF-8, a number of 5,000 digits, nested too deep
        raise EntmtpError(f"{path}: not valid JSON ({error})") from error


def write_jsonl(path: str | Path, rows: Iterable[dict]) -> None:
    with atomic(path) as partial, partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def iter_jsonl(path: str | Path) -> Iterator[tuple[int, int, dict]]:
    """Line number, place in the file (byte) and JSON object of each line that is not blank, one at a time.

    A broken line is an error that names file and line number.
    """
    try:
        with open(path, "rb") as file:
            end = 0
            for number, line in enumerate(file, 1):
                place, end = end, end + len(line)
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise EntmtpError(f"{path}, line {number}: not valid JSON ({error})") from error
                if not isinstance(row, dict):
                    raise EntmtpError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
                yield number, place, row
    except OSError as error:
        raise EntmtpError(f"{path}: {_reason(error)}") from error


def read_jsonl(path: str | Path) -> list[dict]:
    """Read one JSON object a line; a broken line is an error that names file and line number."""
    return [row for _, _, row in iter_jsonl(path)]


def write_parquet(path: str | Path, rows: Any) -> None:
    """Write a DataFrame or a list of dicts as Parquet."""
    import pandas as pd

    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows)
    with atomic(path) as partial:
        frame.to_parquet(partial, index=False)


def read_parquet(path: str | Path) -> Any:
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except FileNotFoundError as error:
        raise EntmtpError(f"{path}: no such file") from error
    except (OSError, ValueError, TypeError, KeyError, NotImplementedError, MemoryError, UnicodeError) as error:
        raise EntmtpError(f"{path}: not a readable Parquet file ({error})") from error


def sha256_file(path: str | Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EntmtpError(f"{path}: {_reason(error)}") from error


def check_sha256(path: str | Path, expected: str, problem: str) -> None:
    """Refuse a file that is not the one whose hash was written down; "" where none was. A missing file is for whoever
    reads it."""
    if expected and Path(path).is_file() and sha256_file(path) != expected:
        raise EntmtpError(f"{path}: {problem}")


def weights_digest(folder: str | Path, windows: int = 512, width: int = 1 << 16) -> str:
    """SHA-256 over names, sizes and evenly spaced parts of the weight files, both ends among them: tells fine-tunes
    apart, of some layers only too, without reading gigabytes. Files of up to `windows` · `width` bytes (32 MiB) are
    read whole."""
    digest = hashlib.sha256()
    for path in sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= windows * width:
                digest.update(file.read())
                continue
            for number in range(windows):
                file.seek(number * (size - width) // (windows - 1))
                digest.update(file.read(width))
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hash of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()  # JSON can escape half a character


def check_name(what: str, name: str) -> str:
    """A name that becomes part of a path must not lead elsewhere."""
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise EntmtpError(f"{what} '{name}': a name has letters, digits, '_', '-' and '.' only, and no '.' in front")
    return name


def check_writable(folder: str | Path, key: str) -> None:
    """Refuse an unwritable folder before any work starts; `key` is the setting that named it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise EntmtpError(f"{key}={folder}: not a writable folder ({error.strerror}); choose another one") from error


def journal_of(path: str | Path) -> Path:
    """Where the finished rows of a timed file lie until what checks them has read it."""
    return Path(path).with_suffix(".journal.jsonl")


class Journal:
    """A JSONL file of finished pieces of a long job, so that an interrupted job resumes and loses nothing.

    A line is complete or ignored: a torn last line (the job was killed while writing) is cut off on opening.
    The first line is a fingerprint of the job; a journal of another job is started afresh.
    """

    def __init__(self, path: str | Path, fingerprint: str):
        self.path = Path(path)
        self.rows: list[dict] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            content = self.path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            rows = self._parse(whole)
            if rows and rows[0] == {"fingerprint": fingerprint}:
                self.rows = rows[1:]
                if len(whole) < len(content):  # cut the torn line in place: finished lines are never rewritten
                    os.truncate(self.path, len(whole))
                return
        write_text(self.path, json.dumps({"fingerprint": fingerprint}) + "\n")

    def _parse(self, content: bytes) -> list[dict]:
        rows = []
        for number, line in enumerate(content.splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise EntmtpError(f"{self.path}, line {number}: damaged journal ({error}); delete it") from error
        return rows

    def append(self, row: dict) -> None:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise EntmtpError(f"cannot write {self.path}: {error.strerror}; what it holds is kept") from error
        self.rows.append(row)

    def done(self, key: Callable[[dict], Any]) -> set:
        return {key(row) for row in self.rows}

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
