"""JSON schemas of the files that cross stages (`workflow/schemas/<name>.schema.json`)."""

from typing import Any

from entmtp.config import shipped
from entmtp.errors import EntmtpError
from entmtp.io import read_json

SCHEMAS = shipped("schemas", "workflow/schemas")


def check_schema(value: Any, name: str) -> None:
    """Raise EntmtpError, naming the place, unless `value` fits schema `name` (summary, bank, policy)."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(read_json(SCHEMAS / f"{name}.schema.json")).iter_errors(value))
    if error is not None:
        raise EntmtpError(f"{name}.json, {error.json_path}: {error.message[:300]}")
