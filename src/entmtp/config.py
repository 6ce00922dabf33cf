"""Composing `conf/` into the dataclasses of `entmtp.settings`: a typo or an ill-typed value names the key."""

from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.version import __version__ as omegaconf_version

from entmtp.errors import EntmtpError, first_line
from entmtp.io import check_name
from entmtp.kept import kept
from entmtp.settings import (
    BankConfig,
    BenchConfig,
    ConfAdaptConfig,
    Config,
    CorpusConfig,
    DecodingConfig,
    DistillConfig,
    GrowthConfig,
    HeadsConfig,
    LatencyConfig,
    MtpConfig,
    PlotConfig,
    PolicyConfig,
    PromptSource,
    ReplayedConfig,
    SearchConfig,
    SweepConfig,
    TargetConfig,
    TaskConfig,
    TrackingConfig,
    TrainConfig,
)

__all__ = [
    "CONF",
    "BankConfig",
    "BenchConfig",
    "ConfAdaptConfig",
    "Config",
    "CorpusConfig",
    "DecodingConfig",
    "DistillConfig",
    "GrowthConfig",
    "HeadsConfig",
    "LatencyConfig",
    "MtpConfig",
    "PlotConfig",
    "PolicyConfig",
    "PromptSource",
    "ReplayedConfig",
    "SearchConfig",
    "SweepConfig",
    "TargetConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainConfig",
    "check_choice",
    "choices",
    "compose",
    "from_plain",
    "refuse_aliases",
    "to_plain",
    "validate",
]

KINDS = ("ar", "static", "star", "ladder", "tau", "cost_aware", "adaptive", "bandit", "dynamic", "marginal")
PACKAGE = Path(__file__).resolve().parent


def shipped(name: str, in_checkout: str) -> Path:
    """What a wheel carries inside the package (setup.py), and a checkout has elsewhere."""
    return PACKAGE / name if (PACKAGE / name).exists() else PACKAGE.parents[1] / in_checkout


CONF = shipped("conf", "conf")


# Hydra starts from the dataclasses (conf/config.yaml lists `schema` first), so that every key can be overridden by
# name, whether a YAML file spells it out or not, and is typed.
ConfigStore.instance().store(name="schema", node=Config)


def choices(group: str) -> list[str]:
    """Names that a conf group offers: its YAML files."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def check_choice(group: str, name: str) -> None:
    if name not in choices(group):
        raise EntmtpError(f"unknown {group} '{name}': choose one of {', '.join(choices(group))}")


@cache
def refuse_aliases(folder: Path) -> None:
    """A YAML file whose aliases nest grows without end when it is composed. Ours need none, so none are taken."""
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "&" not in text or "*" not in text:
            continue
        try:
            alias = next((event for event in yaml.parse(text) if isinstance(event, yaml.AliasEvent)), None)
        except yaml.YAMLError:
            continue  # composing says what is wrong with it
        if alias is not None:
            raise EntmtpError(f"{path}, line {alias.start_mark.line + 1}: YAML aliases (*{alias.anchor}) are not taken")


def validate(raw: DictConfig) -> Config:
    """Type-check a composed config against the dataclasses. Raises EntmtpError that names the key."""
    return _checked(_resolved(raw))


def _resolved(raw: DictConfig) -> dict:
    try:
        return OmegaConf.to_container(raw, resolve=True)
    except OmegaConfBaseException as error:
        raise _named(error) from error


def _checked(plain: dict) -> Config:
    config: Config = from_plain(Config, plain)  # from a plain dict: an unknown key that ++ forced in is an error too
    _check_values(config)
    return config


def compose(overrides: list[str]) -> Config:
    """Compose `conf/` with Hydra overrides (`experiment=main`, `policy=ar`, `policy.tau_on=0.3`, …) and validate."""
    if not CONF.is_dir():
        raise EntmtpError(
            f"no configuration in {CONF}: this installation of entmtp is incomplete; install its wheel again, or use a "
            "checkout of the repository (pip install -e .)"
        )
    refuse_aliases(CONF)
    for override in overrides:
        group, _, value = override.lstrip("+~").partition("=")
        if (CONF / group).is_dir() and value and "," not in value:
            check_choice(group, value)
    sources = _sources()

    def make() -> dict:
        return to_plain(_checked(_composed(overrides)))

    # what asks the environment (or a clock) may be another value next time
    asked = [*overrides, *(text for name, text in sources[0] if name.endswith(".yaml"))]
    fixed = not any("${oc." in text for text in asked)
    return _built(Config, kept("conf", [overrides, *sources], make) if fixed else make())


def _sources() -> list:
    """What a composed configuration follows from, beside the overrides."""
    files = [PACKAGE / "settings.py", PACKAGE / "config.py", *sorted(CONF.rglob("*.yaml"))]
    read = [["/".join(path.parts[-2:]), path.read_text(errors="replace")] for path in files]
    return [read, hydra.__version__, omegaconf_version]


def _composed(overrides: list[str]) -> dict:
    """Half a second of Hydra's; a run is composed anew for each of its tasks, policies and kinds of heads."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            return _resolved(hydra_compose("config", overrides=overrides))
    except HydraException as error:
        causes = [error, *([error.__cause__] if error.__cause__ else [])]
        raise EntmtpError("config: " + " · ".join(" ".join(str(cause).split()) for cause in causes)) from error


def _built(kind: Any, value: Any) -> Any:
    """What `to_plain` took apart. OmegaConf does that too, and checks every type again, in a fifth of a second."""
    arguments = [argument for argument in get_args(kind) if argument is not NoneType]
    if is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{name: _built(types[name], part) for name, part in value.items()})
    if isinstance(value, list) and arguments:
        return [_built(arguments[0], part) for part in value]
    if isinstance(value, dict) and arguments:
        return {key: _built(arguments[1], part) for key, part in value.items()}
    return value


def to_plain(config: Any) -> dict:
    """Dataclass to plain dict (JSON, rule params)."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=True)


def from_plain(cls: type, block: Any) -> Any:
    """Dict (a rule's params, a composed config) to its dataclass. Raises EntmtpError that names the key."""
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), block))
    except OmegaConfBaseException as error:
        raise _named(error) from error


def _check_regions(distill: DistillConfig) -> None:
    """The paper's rows divide, and leave a real token between two blocks at the largest k."""
    if distill.regions == 0:
        return
    if distill.masks_only:
        raise EntmtpError("config key 'distill.regions': rows of regions train a whole model; with distill.masks_only "
                          "blocks lie in answers, by distill.spacing and distill.blocks")  # fmt: skip
    fits = distill.regions > 0 and distill.row_width % distill.regions == 0
    if not fits or distill.row_width // distill.regions < distill.k_max:
        raise EntmtpError(
            f"config key 'distill.row_width': {distill.row_width} must be a multiple of "
            f"distill.regions={distill.regions}, and at least distill.k_max={distill.k_max} times as much"
        )


def _check_second_method(config: Config) -> None:
    """What would be found only after hours of training."""
    blocks = config.confadapt
    for key in ("thresholds", "mask_thresholds"):
        wrong = [value for value in getattr(blocks, key) if not 0 < value <= 1]
        if wrong:
            raise EntmtpError(f"config key 'confadapt.{key}': {wrong[0]} must be above 0 and at most 1")
    wrong = [k for k in blocks.static if not 1 <= k <= blocks.k_max]
    if wrong:
        raise EntmtpError(f"config key 'confadapt.static': {wrong[0]} must be from 1 to confadapt.k_max={blocks.k_max}")
    if config.distill.masks_only and config.distill.lora_rank < 1:
        raise EntmtpError("config key 'distill.lora_rank': with distill.masks_only the weights stay, so that adapters "
                          "of rank 1 at least are needed")  # fmt: skip


def _named(error: OmegaConfBaseException) -> EntmtpError:
    return EntmtpError(f"config key '{getattr(error, 'full_key', None) or '?'}': {first_line(error)}")


def _check_values(config: Config) -> None:
    """Values that a type cannot express. Names of tasks and policies are checked where lists name them."""
    for group, names in (
        ("task", [*config.tasks, *config.heads_tasks, *config.distill.prompts]),
        ("policy", config.policies),
        ("heads", config.heads_trained),
    ):
        for name in names:
            check_choice(group, name)
    groups = ("target", "heads", "corpus", "task", "policy", "mtp", "distill")
    for key in ("experiment", *(f"{group}.name" for group in groups)):
        block, _, name = key.rpartition(".")
        check_name(f"config key '{key}':", getattr(getattr(config, block) if block else config, name))
    if config.confadapt.enabled and config.decoding.mode != "greedy":
        raise EntmtpError(
            f"config key 'decoding.mode': {config.decoding.mode}, but blocks are decoded greedily and must stand "
            "beside greedy texts; decoding.mode=greedy, or confadapt.enabled=false"
        )
    one_of = {
        "dtype": (config.dtype, ("float32", "bfloat16", "float16")),
        "decoding.mode": (config.decoding.mode, ("greedy", "sample", "typical")),
        "search.engine": (config.search.engine, ("replay", "rollout")),
        "bank.basis": (config.bank.basis, ("measured", "predicted")),
        "tracking.mode": (config.tracking.mode, ("offline", "online", "disabled")),
        "target.forward": (config.target.forward, ("auto", "fused", "generic")),
        "policy.kind": (config.policy.kind, KINDS),
        "policy.model": (config.policy.model, (None, "single", "multi")),
        "heads.arch": (config.heads.arch, ("medusa", "hydra")),
        "heads.storage": (config.heads.storage, ("bfloat16", "target")),
        "mtp.source": (config.mtp.source, ("distilled", "adapter", "hub", "folder")),
        "mtp.forward": (config.mtp.forward, ("auto", "fused", "generic")),
        "corpus.dtype": (config.corpus.dtype, ("auto", "float32", "bfloat16", "float16")),
        "distill.dtype": (config.distill.dtype, ("auto", "float32", "bfloat16")),
        "task.scoring": (config.task.scoring, (None, "number", "begins", "contains", "sequence", "code")),
    }
    verified = enumerate(config.confadapt.lossless)
    one_of |= {f"confadapt.lossless[{number}]": (name, ("self", "draft")) for number, name in verified}
    for key, (value, allowed) in one_of.items():
        if value not in allowed:
            raise EntmtpError(f"config key '{key}': '{value}' is not one of {', '.join(map(str, allowed))}")
    positive = {
        "decoding.max_new_tokens": config.decoding.max_new_tokens,
        "task.calib": config.task.calib,
        "task.test": config.task.test,
        "search.max_nodes": config.search.max_nodes,
        "heads.depth": config.heads.depth,
        "heads.width": config.heads.width,
        "growth.beam": config.growth.beam,
        "growth.children": config.growth.children,
        "policy.nodes": config.policy.nodes,
        "policy.bins": config.policy.bins,
        "policy.memory": 1 if config.policy.memory is None else config.policy.memory,
        "corpus.shards": config.corpus.shards,
        **{f"distill.prompts.{task}": count for task, count in config.distill.prompts.items()},
        "distill.text_batch": config.distill.text_batch,
        "distill.k_max": config.distill.k_max,
        "distill.spacing": config.distill.spacing,
        "distill.blocks": config.distill.blocks,
        "distill.batch": config.distill.batch,
        "distill.accumulate": config.distill.accumulate,
        "distill.steps": config.distill.steps,
        "distill.report_every": config.distill.report_every,
        "distill.checkpoint_every": config.distill.checkpoint_every,
        "bench.bootstrap": config.bench.bootstrap,
        "scheduling.bank_trees": config.scheduling.bank_trees,
        "scheduling.bank_tries": config.scheduling.bank_tries,
        "confadapt.k_max": config.confadapt.k_max,
        "confadapt.max_nodes": config.confadapt.max_nodes,
    }
    for key, value in positive.items():
        if value < 1:
            raise EntmtpError(f"config key '{key}': {value} must be at least 1")
    if config.confadapt.enabled and config.mtp.source == "distilled" and not config.distill.prompts:
        raise EntmtpError("config key 'distill.prompts' is empty: name tasks to learn from and how many prompts each, "
                          "such as +distill.prompts={gsm8k:1000}")  # fmt: skip
    _check_regions(config.distill)
    _check_second_method(config)
    if config.policies and "ar" not in config.policies:
        raise EntmtpError(f"config key 'policies': {config.policies} lacks ar, plain decoding, with which every text "
                          "and speed is compared")  # fmt: skip
    if config.policy.name == "hydra" and config.heads.arch != "hydra":
        raise EntmtpError(f"policy 'hydra' drafts with hydra heads, not {config.heads.name}: use policy=medusa")
    if config.decoding.mode != "greedy" and config.decoding.temperature <= 0:
        raise EntmtpError(f"config key 'decoding.temperature': {config.decoding.temperature} must be above 0")
