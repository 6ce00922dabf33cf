# Compose conf/ once and hand each rule only its own block, so that a change reruns what depends on it and no more.
import os
import sys
from pathlib import Path

from entmtp.config import compose, to_plain
from entmtp.errors import EntmtpError
from entmtp.io import check_writable, weights_digest
from entmtp.layout import (
    command_of,
    compose_heads,
    compose_task,
    existing,
    heads_folder,
    multi_token_folder,
    prompt_file,
    reports_scheduling,
    run_folder,
    split_overrides,
    target_folder,
)

# Jobs get their memory in huge pages where the C library is glibc: decoding streams the weights at every step, and
# looking up 4 KB pages costs a tenth of it and more (docs/LOG.md).
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")

KINDS_OF_POLICY = ("ar", "static")
GROWING = ("dynamic", "marginal")


def composed():
    overrides = [f"experiment={config.get('experiment', 'quick')}", *split_overrides(config.get("overrides", ""))]
    cfg = compose(overrides)
    tasks = {
        task: compose_task(cfg, overrides, task).task for task in [*cfg.tasks, *cfg.heads_tasks, *cfg.distill.prompts]
    }
    policies = {name: compose([*overrides, f"policy={name}"]).policy for name in cfg.policies}
    used = {policy.heads for policy in policies.values() if policy.heads}
    kinds = sorted(used | {cfg.heads.name} | set(cfg.heads_trained))
    heads = {kind: compose_heads(cfg, overrides, kind) for kind in kinds}
    unjudged = [task for task in cfg.tasks if cfg.confadapt.enabled and tasks[task].scoring is None]
    if unjudged:
        raise EntmtpError(
            f"confadapt.enabled: task {unjudged[0]} has no task.scoring, and ConfAdapt is judged on tasks with known answers"
        )
    return cfg, tasks, policies, heads


try:
    CFG, TASK_CFG, POLICY_CFG, HEADS_CFG = composed()
    check_writable(CFG.results, "results")
except EntmtpError as error:
    sys.exit(f"error: {error}")

TASKS, POLICIES = list(CFG.tasks), list(POLICY_CFG)
RUN = str(run_folder(CFG))
SCIENCE = f"{RUN}/scheduling"
LOGS = f"logs/{CFG.experiment}"
MODEL = str(
    target_folder(CFG.target, CFG.resources) / ("config.json" if CFG.target.source == "folder" else "entmtp.json")
)
MTP = str(multi_token_folder(CFG, RUN) / ("entmtp.json" if CFG.mtp.source == "hub" else "config.json"))
PLAIN = to_plain(CFG)


def own_weights(model, key):
    """What tells the weights of a folder of one's own, read once a call."""
    return {key: weights_digest(model.path or "")} if model.source == "folder" else {}


OWN_TARGET, OWN_MTP = own_weights(CFG.target, "weights"), own_weights(CFG.mtp, "mtp_weights")
# kinds of heads whose trees are searched: those of policies that use a bank
CALIBRATED = sorted({p.heads for p in POLICY_CFG.values() if p.heads and p.kind not in KINDS_OF_POLICY})
USED = sorted({p.heads for p in POLICY_CFG.values() if p.heads})
# what a job asks for that opens the target on a GPU; None leaves the resource out
GPU = 1 if CFG.device.startswith("cuda") else None
# kinds of heads whose policies grow trees
GROWN = sorted({p.heads for p in POLICY_CFG.values() if p.kind in GROWING})
# whose policies `snakemake scheduling` judges
JUDGED_KIND = CFG.heads.name
FIGURES = [
    "speedup",
    "throughput_tree_size",
    "acceptance_frontier",
    "step_latency",
    "accept_entropy",
    "tree_choice",
    "scheduler_overhead",
]
SHARDS = [f"{shard:03d}" for shard in range(CFG.corpus.shards)]
TABLES = ["speed", "perplexity", "trees"]
PRODUCTS = ["summary.json", "report.html", "replay_generation.html", "config.yaml"]


wildcard_constraints:
    task="[A-Za-z0-9_]+",
    heads="[A-Za-z0-9_]+",
    policy="[A-Za-z0-9_]+",
    shard="[0-9]{3}",


def base():
    """What every rule that opens the target needs to know. Models that are fetched or made here have other `config.json`
    or `entmtp.json` where their weights are others; a folder of one's own may not."""
    keys = ("target", "dtype", "device", "threads")
    return {**{key: PLAIN[key] for key in keys}, **OWN_TARGET, "resources": lambda wildcards: CFG.resources}


def source_of(block):
    """Where a model comes from: what else is said of it is no reason to fetch it again."""
    return {
        key: block[key] for key in ("name", "source", "wheel", "sha256", "file", "repo", "revision", "path", "seed")
    }


def multi_token_block():
    """The second method's model, as those who use it see it."""
    return {"mtp": PLAIN["mtp"], **OWN_MTP}


def heads_config(kind):
    """Path of the native format's config.json of one kind of heads."""
    return str(heads_folder(HEADS_CFG[kind], CFG.target.name, CFG.resources, RUN) / "config.json")


def heads_block(kind):
    """Heads as those who use them see them; how they were trained is no reason to run anything again."""
    return {key: value for key, value in to_plain(HEADS_CFG[kind]).items() if key != "train"}


def heads_command():
    """What repeats the training, for the heads' card."""
    return command_of("snakemake heads --cores all", CFG.experiment, split_overrides(config.get("overrides", "")))


def block(**parts):
    return {**base(), **parts}


def policy_path(task, name):
    return f"{RUN}/trees/{POLICY_CFG[name].heads or 'none'}/{task}/policy/{name}.json"


def bank_paths(task):
    return [f"{RUN}/trees/{kind}/{task}/bank.json" for kind in CALIBRATED]


def published():
    """Final products, in the run folder and, for the run made last, right under results/."""
    return [f"{CFG.results}/{name}" for name in PRODUCTS]


def policy_inputs(wildcards):
    """What fitting a policy reads: nothing for policies without a bank."""
    if POLICY_CFG[wildcards.policy].kind in KINDS_OF_POLICY:
        return {}
    trees = f"{RUN}/trees/{wildcards.heads}/{wildcards.task}"
    growth = f"{RUN}/traces/{wildcards.heads}/{wildcards.task}.calib.growth.npz"
    return {
        **({"growth": growth} if POLICY_CFG[wildcards.policy].kind in GROWING else {}),
        "bank": f"{trees}/bank.json",
        "traces": f"{RUN}/traces/{wildcards.heads}/{wildcards.task}.calib.parquet",
        "latency": f"{RUN}/latency/{wildcards.heads}.json",
    }


def judged_growth(tasks, split="test"):
    """Expansions of the tasks' texts of one split, where policies of the judged heads grow trees."""
    return [f"{RUN}/traces/{JUDGED_KIND}/{task}.{split}.growth.npz" for task in tasks if JUDGED_KIND in GROWN]


def task_block(wildcards):
    """A task as its prompts are drawn: how answers are judged changes none."""
    return {key: value for key, value in to_plain(TASK_CFG[wildcards.task]).items() if key != "scoring"}


def task_source(wildcards):
    """The file of one's own, or a shipped one, that a task's prompts are rows of."""
    return existing(prompt_file(TASK_CFG[wildcards.task], CFG.resources))


def corpus_sources():
    """The files whose prompts make head-training text, or are kept out of it."""
    return existing(*(source.file for source in [*CFG.corpus.prompts, *CFG.corpus.exclude]))


def kept_out():
    """Prompts that heads must not learn from: the tasks', and those that judge the heads later where they are at hand."""
    files = {task: prompt_file(TASK_CFG[task], CFG.resources) for task in CFG.heads_tasks}
    judging = [task for task, file in files.items() if file is None or file.is_file()]
    return [f"{RUN}/prompts/{task}.jsonl" for task in dict.fromkeys([*TASKS, *judging])]


def second_method():
    """Products of self-distillation and ConfAdapt, where the experiment asks for them."""
    made = [f"{RUN}/confadapt.json", f"{RUN}/tracking/records/confadapt.json"]
    return made if CFG.confadapt.enabled else []


def scheduling_shown(wildcards):
    """What report.html shows of what scheduling is worth."""
    made = [f"{RUN}/scheduling.json", f"{SCIENCE}/headroom.png", f"{SCIENCE}/prediction.png"]
    return made if reports_scheduling(PLAIN) else []


def scheduling_products():
    """The scheduling analysis, where the experiment asks for it."""
    made = [f"{RUN}/scheduling.json", f"{RUN}/tracking/records/scheduling.json"]
    return made if reports_scheduling(PLAIN) else []


def scheduling_report(name):
    """A product of the scheduling analysis for `snakemake --report`, with its caption."""
    return report(f"{SCIENCE}/{name}", caption=f"../report/{name.partition('.')[0]}.rst", category="Scheduling")


def training_history():
    """The record of a multi-token model that the run trains; a published one has none."""
    return {"history": f"{RUN}/distill/{CFG.distill.name}.json"} if CFG.mtp.source == "distilled" else {}


def training_figures():
    """The curves of that training."""
    made = {"curves": second_report("training.png"), "curves_vector": f"{SECOND}/training.svg"}
    return made if training_history() else {}


def second_report(name):
    """A product of the second method for `snakemake --report`, with its caption."""
    caption = f"../report/{name.partition('.')[0]}.rst"
    return report(f"{SECOND}/{name}", caption=caption, category="Second method")


def second_shown(wildcards):
    """What report.html shows of the second method."""
    made = [f"{RUN}/confadapt.json", f"{SECOND}/frontier.png"]
    return [*made, *([f"{SECOND}/training.png"] if training_history() else [])] if CFG.confadapt.enabled else []


def products():
    """What a run ends with. Figures and report are about draft trees: a run that calibrates none, such as one of the
    second method on published models, ends with its summary and tables."""
    if CALIBRATED:
        return [
            *published(),
            *expand(f"{RUN}/tracking/{{task}}.json", task=TASKS),
            *scheduling_products(),
            *second_method(),
        ]
    return [f"{RUN}/summary.json", f"{RUN}/config.yaml", f"{RUN}/tables/speed.md", *second_method()]


def block_rules():
    """How blocks are decoded; whether programs are executed afterwards is no reason to decode again."""
    return {key: value for key, value in PLAIN["confadapt"].items() if key != "execute_code"}


def measured_config():
    """The configuration without what changes no result of this DAG's timed part, so that it does not rerun that:
    presentation, tracking, and whether programs are executed afterwards."""
    left_out = ("plot", "tracking", "sweep", "replayed", "scheduling")
    return {**{key: value for key, value in PLAIN.items() if key not in left_out}, "confadapt": block_rules()}


def code_block(task):
    """What judging programs takes: the tests' source, and leave to execute."""
    if TASK_CFG[task].scoring != "code":
        return None
    source = {key: to_plain(TASK_CFG[task])[key] for key in ("name", "source", "wheel", "sha256")}
    return {"task": source, "execute": CFG.confadapt.execute_code}


def tracked_files(wildcards):
    """What tables and figures read of a task beside its bench: small files, which its W&B run carries."""
    task = wildcards.task
    made = ("recalibrated", "throughput", "bank")
    return [
        f"{RUN}/config.yaml",
        *(f"{RUN}/{kind}/{task}.json" for kind in ("checks/lossless", "checks/replay", "perplexity")),
        *(f"{RUN}/trees/{kind}/{task}/{name}.json" for kind in CALIBRATED for name in made),
        *(f"{RUN}/latency/{kind}.json" for kind in CALIBRATED),
        *(policy_path(task, name) for name in POLICIES),
    ]


def per_task(pattern):
    return expand(f"{RUN}/{pattern}", task=TASKS)


def reported(folder, names, kind, category):
    """Products for `snakemake --report`, each with its own caption."""
    made = {name: f"{RUN}/{folder}/{name}.{kind}" for name in names}
    return [report(path, caption=f"../report/{name}.rst", category=category) for name, path in made.items()]
