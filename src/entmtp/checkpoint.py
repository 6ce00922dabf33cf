"""Checkpoints of trainings: whole or not at all, and only for the run that they were written by."""

from pathlib import Path

from entmtp.io import atomic


def save_checkpoint(path: str | Path, identity: str, state: dict) -> None:
    """`state` holds tensors and plain values only; `identity` names text and configuration."""
    import torch

    with atomic(path) as partial:
        torch.save({**state, "identity": identity}, partial)


def load_checkpoint(path: str | Path, identity: str, device: str) -> dict | None:
    """The state that this very run saved; None where there is none, or another text's or configuration's."""
    import torch

    if not Path(path).exists():
        return None
    state = torch.load(path, weights_only=True, map_location=device)
    return state if state["identity"] == identity else None
