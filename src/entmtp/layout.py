"""Where the things of a run lie, and the configuration of one task or kind of heads: neither torch nor models."""

from pathlib import Path

from entmtp.config import Config, HeadsConfig, TargetConfig, check_choice, compose
from entmtp.errors import EntmtpError


def group_overrides(group: str, name: str, extra: dict) -> list[str]:
    """Hydra overrides that choose `name` in a group and apply what the experiment changes in it."""
    return [f"{group}={name}", *(f"{group}.{key}={value}" for key, value in extra.items())]


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
