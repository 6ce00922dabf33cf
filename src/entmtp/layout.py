"""Where the things of a run lie, and the configuration of one task or kind of heads: neither torch nor models."""

import re
import shlex
from pathlib import Path
from typing import Any

from entmtp.config import Config, HeadsConfig, TargetConfig, TaskConfig, check_choice, compose
from entmtp.errors import EntmtpError


def split_overrides(given: Any) -> list[str]:
    """Overrides of one command-line argument, at the spaces outside quotes; quotes stay, they are Hydra's.

    Snakemake reads the value of `--config overrides=…` as YAML, which takes a text with ": " in it for a mapping.
    """
    text = ": ".join(*given.items()) if isinstance(given, dict) and len(given) == 1 else str(given or "")
    parts = re.findall(r"""(?:[^\s'"]|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")+""", text)
    whole = "".join("".join(parts).split()) == "".join(text.split())
    return parts if whole else text.split()  # a quote that is never closed: Hydra says so


def command_of(command: str, experiment: str, overrides: list[str]) -> str:
    """A Snakemake call as a shell takes it."""
    said = [f"overrides={shlex.quote(' '.join(overrides))}"] if overrides else []
    return " ".join([f"{command} --config experiment={experiment}", *said])


def group_overrides(group: str, name: str, extra: dict) -> list[str]:
    """Hydra overrides that choose `name` in a group and apply what the experiment changes in it."""

    def change(key: str, value: Any) -> str:
        added = "++" if isinstance(value, dict) else ""  # Hydra closes mappings to new keys
        return f"{added}{group}.{key}={literal(value)}"

    return [f"{group}={name}", *(change(key, value) for key, value in extra.items())]


def literal(value: Any) -> str:
    """A value in Hydra's override grammar: strings quoted, so that braces, spaces and commas are only themselves."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(literal, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):  # the grammar knows backslashes before a quote, and at the end, only
        return "'" + re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), value) + "'"
    return str(value)


def compose_task(config: Config, overrides: list[str], task: str) -> Config:
    """The experiment's config for one task; `config` is `compose(overrides)`."""
    check_choice("task", task)
    return compose([*overrides, *group_overrides("task", task, config.task_overrides.get(task, {}))])


def compose_heads(config: Config, overrides: list[str], heads: str) -> HeadsConfig:
    """The experiment's config of one kind of heads; `config` is `compose(overrides)`."""
    check_choice("heads", heads)
    extra = config.heads_overrides.get(heads, {})
    return compose([*overrides, *group_overrides("heads", heads, extra)]).heads


def run_folder(config: Config) -> Path:
    return Path(config.results) / config.experiment


def reports_scheduling(config: dict[str, Any]) -> bool:
    """Whether the whole run of a resolved configuration ends with the scheduling analysis: it is asked for, and has a
    static optimum to compare with."""
    return bool((config.get("scheduling") or {}).get("in_report")) and "entmtp_star" in config["policies"]


def target_folder(config: TargetConfig, resources: str | Path) -> Path:
    """Where `fetch_target` leaves this target."""
    if config.source == "folder":
        return Path(config.path or "")
    return Path(resources) / "targets" / config.name


def heads_folder(heads: HeadsConfig, target_name: str, resources: str | Path, run: str | Path) -> Path:
    """Shipped heads lie in resources, heads of one's own where the config says, trained and random ones in the run."""
    if heads.source == "shipped":
        return Path(resources) / "heads" / f"{target_name}-{heads.name}"
    if heads.source == "folder":
        if not heads.path:
            raise EntmtpError("heads.source=folder needs heads.path")
        return Path(heads.path)
    return Path(run) / "heads" / heads.name


def multi_token_folder(config: Config, run: str | Path) -> Path:
    """Where the second method's model lies: in the run that makes it, or where it was published."""
    if config.mtp.source == "distilled":
        return Path(run) / "distill" / config.distill.name
    if config.mtp.source == "adapter":
        return Path(run) / "mtp" / config.mtp.name
    return target_folder(config.mtp, config.resources)


def prompt_file(config: TaskConfig, resources: str | Path) -> Path | None:
    """The JSONL file that a task's prompts are rows of; None for other sources."""
    if config.source not in ("file", "shipped") or not config.file:
        return None
    return Path(config.file) if config.source == "file" else Path(resources) / "prompts" / config.file


def existing(*paths: str | Path | None) -> list[str]:
    """Those of these files that are there: what a rule follows from. Where one is missing, the job says so itself."""
    return [str(path) for path in paths if path and Path(path).is_file()]
