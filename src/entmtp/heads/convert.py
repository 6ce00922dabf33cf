"""Published Medusa and Hydra checkpoints to the native format (FACTS 5 describes both).

They are pickles: read with `weights_only=True`, so that nothing in them runs, and written as safetensors. The file's
tensors decide depth and blocks, not its config, which is known to be wrong (Medusa's says 2 heads, the file holds 5).
"""

import pickle
import re
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from entmtp.config import HeadsConfig
from entmtp.errors import EntmtpError, first_line
from entmtp.heads.model import DraftHeads, HeadsFormat, save_heads
from entmtp.heads.prefix import prefix_like
from entmtp.target.fetch import hub_errors

PREFIX = "prefix_embeding_layer."  # sic
UNREAD = (f"{PREFIX}embed_tokens.weight", "input_embed_fn.weight")
FILES = {"medusa": "medusa_lm_head.pt", "hydra": "hydra_lm_head.pt"}


def published_file(config: HeadsConfig) -> Path:
    """The checkpoint file: in a local folder (`heads.path`) or of a pinned Hub repository (`heads.repo`)."""
    name = FILES[config.arch]
    if config.path:
        path = Path(config.path)
        path = path / name if path.is_dir() else path
        if not path.is_file():
            raise EntmtpError(f"heads.path={config.path}: no {name} there")
        return path
    if not config.repo or not config.revision:
        raise EntmtpError("published heads need heads.path, or heads.repo and a pinned heads.revision")
    from huggingface_hub import hf_hub_download

    with hub_errors(config.repo, config.revision):
        return Path(hf_hub_download(config.repo, name, revision=config.revision))


def read_published(path: Path) -> dict[str, Tensor]:
    """Tensors of a published checkpoint; a pickle that holds anything else is refused, not executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise EntmtpError(f"{path}: not a checkpoint of plain tensors ({first_line(error)})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise EntmtpError(f"{path}: expected a dictionary of tensors")
    return state


def convert_published(config: HeadsConfig, target, folder: Path) -> None:
    """Write `config`'s published checkpoint into `folder`, checked against the target's sizes.

    The first `config.depth` heads are kept. Raises EntmtpError that says which tensor does not fit.
    """
    path = published_file(config)
    state = read_published(path)
    renamed = _medusa(state, path) if config.arch == "medusa" else _hydra(state, path)
    depth = 1 + max(int(key.split(".")[1]) for key in renamed if key.startswith("projections."))
    if config.depth > depth:
        raise EntmtpError(f"{path}: holds {depth} heads, heads.depth={config.depth} asks for more")
    kept = {key: value for key, value in renamed.items() if _head_of(key) < config.depth}
    projection = kept["projections.0.weight"]
    if tuple(projection.shape) != (target.vocab_size, target.hidden_size):
        raise EntmtpError(
            f"{path}: its vocabulary projection is {tuple(projection.shape)}, the target needs "
            f"({target.vocab_size}, {target.hidden_size}): these heads are for another target"
        )
    blocks = len({key.split(".")[2] for key in kept if key.startswith("blocks.0.")})
    prefix = asdict(prefix_like(target.config)) if any(key.startswith("prefix.") for key in kept) else None
    heads = DraftHeads(
        HeadsFormat(config.arch, config.depth, blocks, target.hidden_size, target.vocab_size, target.fingerprint,
                    first="residual", projection="own", projection_bias="projections.0.bias" in kept,
                    prefix=prefix),
        torch.arange(target.vocab_size),
    )  # fmt: skip
    try:
        heads.load_state_dict({**{k: v.float() for k, v in kept.items()}, "token_map": heads.token_map})
    except RuntimeError as error:
        raise EntmtpError(f"{path}: tensors do not fit {config.arch} heads ({error})") from error
    save_heads(heads, folder)


def _medusa(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """`{k}.{i}.linear.*` are blocks, the last `{k}.{layers}.weight` is head k's projection."""
    renamed = {}
    for key, value in state.items():
        block = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", key)
        projection = re.fullmatch(r"(\d+)\.(\d+)\.(weight|bias)", key)
        if block:
            renamed[f"blocks.{block[1]}.{block[2]}.{block[3]}"] = value
        elif projection:
            renamed[f"projections.{projection[1]}.{projection[3]}"] = value
        else:
            raise EntmtpError(f"{path}: unknown tensor '{key}' in a Medusa checkpoint")
    return _require_projections(renamed, path)


def _hydra(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """arch `mlp`: `hydra_mlp.{k}.{i}.*`, block 0 widens and has a `res_connection`; `hydra_lm_head.{k}.*`.

    arch `prefix-mlp` (Hydra++): the same behind dropout slots (blocks at odd places, `hydra_lm_head.{k}.1.*`), and the
    prefix attention layer as a whole one-layer model, whose embedding table nobody reads.
    """
    prefixed = any(key.startswith(PREFIX) for key in state)
    slot = r"\.1" if prefixed else ""
    renamed = {}
    for key, value in state.items():
        block = re.fullmatch(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)", key)
        projection = re.fullmatch(rf"hydra_lm_head\.(\d+){slot}\.(weight|bias)", key)
        if block:
            place = int(block[2])
            if prefixed and place % 2 == 0:
                raise EntmtpError(f"{path}: '{key}' lies where arch prefix-mlp has dropout")
            place = place // 2 if prefixed else place
            name = f"first.{block[1]}.{block[3]}" if place == 0 else f"blocks.{block[1]}.{place - 1}"
            renamed[f"{name}.{block[4]}"] = value
        elif projection:
            renamed[f"projections.{projection[1]}.{projection[2]}"] = value
        elif prefixed and (key in UNREAD or key.endswith("rotary_emb.inv_freq")):
            continue
        elif key.startswith(PREFIX):
            renamed[f"prefix.{key.removeprefix(PREFIX)}"] = value
        else:
            raise EntmtpError(f"{path}: unknown tensor '{key}' in a Hydra checkpoint")
    return _require_projections(renamed, path)


def _head_of(key: str) -> int:
    """Head that a renamed tensor belongs to; the prefix layer serves all of them."""
    return 0 if key.startswith("prefix.") else int(key.split(".")[1])


def _require_projections(renamed: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    if "projections.0.weight" not in renamed:
        raise EntmtpError(f"{path}: holds no vocabulary projection")
    return renamed
