"""Loading what a run needs, by configuration: target, heads, decoders, fitted policies of a run folder."""

import sys
from collections.abc import Iterable
from pathlib import Path

from entmtp.config import HeadsConfig, TargetConfig
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.heads.drafter import make_drafter
from entmtp.heads.model import load_kind
from entmtp.io import check_name, read_json
from entmtp.layout import target_folder
from entmtp.policy.fit import build_policy
from entmtp.policy.schedulers import Policy
from entmtp.policy.stored import check_indices, check_stored
from entmtp.target.fetch import SENTINEL, fetch_target
from entmtp.target.load import Target, load_target
from entmtp.tree.bank import Bank


def fetched(config: TargetConfig, resources: str | Path) -> Path:
    """The target's model folder; downloaded and converted, once, where it is not there yet."""
    folder = target_folder(config, resources)
    if config.source != "folder" and not (folder / SENTINEL).is_file():
        print(f"target {config.name}: fetching and converting it into {folder}, once …", file=sys.stderr, flush=True)
    return fetch_target(config, folder)


def open_target(config: TargetConfig, resources: str | Path, dtype: str, device: str) -> Target:
    return load_target(config, fetched(config, resources), dtype, device)


def open_decoder(target: Target, heads: HeadsConfig | None, folder: Path | None, capacity: int) -> Decoder:
    """A decoder with packed heads from `folder`, or without heads (plain decoding only)."""
    if heads is None:
        return Decoder(target, None, capacity)
    return Decoder(target, make_drafter(load_kind(folder, target, heads), target, heads.width, heads.storage), capacity)


def capacity_for(prompts: Iterable[dict], max_new_tokens: int, max_nodes: int) -> int:
    """Cache rows that the longest of the prompts needs."""
    longest = max((len(prompt["token_ids"]) for prompt in prompts), default=0)
    return Decoder.room(longest, max_new_tokens, max_nodes)


def load_policy(run: str | Path, task: str, heads: str | None, policy: str) -> tuple[Policy, dict, Bank | None]:
    """A fitted policy of a run folder, its JSON and its bank."""
    check_name("task", task)
    return load_fitted(Path(run) / "trees" / (heads or "none") / task, policy, Path(run).name)


def load_fitted(folder: Path, policy: str, experiment: str = "…") -> tuple[Policy, dict, Bank | None]:
    """A fitted policy of one task's folder of trees, `<run>/trees/<heads>/<task>`, its JSON and its bank."""
    path = folder / "policy" / f"{check_name('policy', policy)}.json"
    if not path.is_file():
        raise EntmtpError(
            f"no fitted policy '{policy}' for task '{folder.name}' ({path} is missing): run "
            f"`snakemake --cores all --config experiment={experiment}` first, or use policy=ar or policy=hydra"
        )
    fitted = check_stored(read_json(path), path)
    bank = Bank.load(folder / "bank.json") if fitted["trees"] else None
    if bank is not None:
        check_indices(fitted, len(bank.trees), path)
    try:
        return build_policy(fitted, bank), fitted, bank
    except (KeyError, TypeError, ValueError) as error:  # a kind that this version does not know, a key too many
        raise EntmtpError(f"{path}: not a policy that this version can build ({error}); fit it again") from error
