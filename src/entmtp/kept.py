"""What takes a while to make and follows from its inputs alone, kept in the user's cache folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entmtp.errors import EntmtpError
from entmtp.io import read_json, sha256_json, write_json

MOST = 300  # values of a kind


def cache_folder() -> Path:
    """$ENTMTP_CACHE, else the user's cache folder. Compiled code lies there as well."""
    own = os.environ.get("ENTMTP_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "entmtp"


def kept(kind: str, inputs: Any, make: Callable[[], Any]) -> Any:
    """`make()`, or what it gave for the same `inputs` before. Inputs and values are JSON.

    A damaged file, or a folder that cannot be written, costs the time to make it again and no more.
    """
    path = cache_folder() / kind / f"{sha256_json(inputs)[:32]}.json"
    try:
        return read_json(path)
    except EntmtpError:
        pass  # not there yet, or damaged
    made = make()
    try:
        if json.loads(json.dumps(made, allow_nan=False)) == made:
            write_json(path, made)
            for old in sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-MOST]:
                old.unlink()
    except (EntmtpError, OSError, TypeError, ValueError):
        pass
    return made
