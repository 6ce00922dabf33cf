"""Checkpoints of trainings: whole or not at all, and only for the run that they were written by."""

import pickle
from pathlib import Path

from entmtp.errors import EntmtpError, first_line
from entmtp.io import atomic


def save_checkpoint(path: str | Path, identity: str, state: dict) -> None:
    """`state` holds tensors and plain values only; `identity` names text and configuration."""
    import torch

    with atomic(path) as partial:
        try:
            torch.save({**state, "identity": identity}, partial)
        except RuntimeError as error:  # a full disk, in torch's words
            raise EntmtpError(f"cannot write {path}: {first_line(error)}") from error


def load_checkpoint(path: str | Path, identity: str, device: str) -> dict | None:
    """The state that this very run saved; None where there is none, or another text's or configuration's."""
    import torch

    if not Path(path).exists():
        return None
    try:
        state = torch.load(path, weights_only=True, map_location=device)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise EntmtpError(f"{path}: damaged checkpoint ({first_line(error)}); delete it") from error
    return state if state["identity"] == identity else None
