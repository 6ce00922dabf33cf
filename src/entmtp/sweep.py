"""`python -m entmtp.sweep -m …`: a Hydra multirun over policies, by replay of a run folder's traces or live.

A job writes `row.json` into its Hydra folder; at the end `sweep_gather` makes `rows.parquet`, `rows.csv` and one heat
map (tau_on × tau_off) a task and policy. Files are the only link between jobs, so that any launcher and sweeper works.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from entmtp.config import CONF, Config, HeadsConfig, check_choice, refuse_aliases, validate
from entmtp.errors import EntmtpError, first_line
from entmtp.io import read_json, read_parquet, write_json
from entmtp.sweep_gather import started


def run_job(config: Config) -> dict:
    """The row of one job: predicted (replay) or measured (live) speed of the policy that `config` describes.

    star_tokens_per_s is the speed of the static optimum, the bank's star, on the same texts by the same engine.
    Milliseconds are totals; num_accepted is a mean a step, accept_length num_accepted + 1;
    shares are of steps, in the order of `trees` (their nodes). Replay leaves out the prefill and each text's last
    token; live counts both, as the bench does. Raises EntmtpError for a missing run folder.
    """
    policy = config.policy
    row: dict[str, Any] = {
        "task": config.task.name, "policy": policy.name, "kind": policy.kind, "heads": policy.heads,
        "experiment": config.experiment, "split": config.sweep.split, "engine": config.sweep.engine,
        "tau_on": policy.tau_on, "tau_off": policy.tau_off, "depth": policy.depth, "status": "ok", "reason": None,
    }  # fmt: skip
    _check(config)
    if policy.kind == "tau" and None not in (policy.tau_on, policy.tau_off) and policy.tau_off > policy.tau_on:
        reason = f"tau_off={policy.tau_off:g} exceeds tau_on={policy.tau_on:g}: the thresholds would cross"
        return {**row, "status": "skipped", "reason": reason}
    return {**row, **_evaluate(config)}


def _check(config: Config) -> None:
    for key, allowed in (("split", ("calib", "test")), ("engine", ("replay", "live"))):
        if (value := getattr(config.sweep, key)) not in allowed:
            raise EntmtpError(f"config key 'sweep.{key}': '{value}' is not one of {', '.join(allowed)}")
    if config.sweep.prompts is not None and config.sweep.prompts < 1:
        raise EntmtpError(f"config key 'sweep.prompts': {config.sweep.prompts} must be at least 1")


def _need(config: Config, path: Path) -> Path:
    if path.is_file():
        return path
    task, experiment = config.task.name, config.experiment
    listed = "" if task in config.tasks else f" overrides=tasks=[{task}]"
    command = f"snakemake --cores all --config experiment={experiment}{listed}"
    raise EntmtpError(f"{path} is missing: the pipeline has not made it for task '{task}': run `{command}` first")


def _evaluate(config: Config) -> dict:
    from entmtp.calibration.growth import load_growth
    from entmtp.calibration.latency_table import LatencyTable
    from entmtp.calibration.replay import Trace
    from entmtp.layout import run_folder
    from entmtp.policy.fit import GROWING, build_policy, fit_policy
    from entmtp.tree.bank import Bank

    run, task, split = run_folder(config), config.task.name, config.sweep.split
    kind = config.policy.heads or config.heads.name  # plain decoding is replayed on any heads' traces
    bank = Bank.load(_need(config, run / "trees" / kind / task / "bank.json"))
    latency = LatencyTable.from_json(read_json(_need(config, run / "latency" / f"{kind}.json")))
    calib = Trace.from_frame(read_parquet(_need(config, run / "traces" / kind / f"{task}.calib.parquet")))
    if config.policy.kind in GROWING:
        calib.growth = load_growth(_need(config, run / "traces" / kind / f"{task}.calib.growth.npz"))
    fitted = fit_policy(config.policy, bank, calib, latency)
    static = {"policy": "static", "kind": "star", "trees": [bank.star]}
    if config.sweep.engine == "live":
        counts, star = _live(config, kind, [build_policy(one, bank) for one in (fitted, static)])
    else:
        trace = calib
        if split != "calib":
            trace = Trace.from_frame(read_parquet(_need(config, run / "traces" / kind / f"{task}.{split}.parquet")))
            if config.policy.kind in GROWING:
                path = _need(config, run / "traces" / kind / f"{task}.{split}.growth.npz")
                trace.growth = load_growth(path)
        counts = _replay(trace, fitted, bank, latency)
        star = _replay(trace, static, bank, latency)
    ratio = counts["tokens_per_s"] / star["tokens_per_s"]
    optimum = {"star_tokens_per_s": star["tokens_per_s"], "star_nodes": star["trees"][0], "over_star": ratio}
    return {**{key: fitted[key] for key in ("tau_on", "tau_off", "depth")}, **counts, **optimum}


def _replay(trace, fitted: dict, bank, latency) -> dict:
    """Replayed counts of a fitted policy, and milliseconds as the fit predicts them."""
    from entmtp.calibration.replay import replay_policy
    from entmtp.policy.fit import build_policy, replayed_speed

    policy = build_policy(fitted, bank)
    steps = [step for run in replay_policy(trace, policy) for step in run]
    tokens = int(trace.bounds[-1]) - len(trace.prompts)  # the last token of a text needs no step
    milliseconds = 1000 * tokens / replayed_speed(fitted, bank, trace, latency)
    return _counts(policy, [(step.tree, step.accepted) for step in steps], tokens, milliseconds, len(trace.prompts))


def _live(config: Config, kind: str, policies: list) -> list[dict]:
    """Measured counts of each policy, in one process and alternating prompt by prompt in a rotated order."""
    import torch

    from entmtp.layout import heads_folder, run_folder
    from entmtp.session import capacity_for, open_decoder, open_target
    from entmtp.tasks import read_prompts

    run = run_folder(config)
    file = _need(config, run / "prompts" / f"{config.task.name}.jsonl")
    prompts = read_prompts(file, config.sweep.split)[: config.sweep.prompts]
    heads = _heads(config, kind)
    folder = heads_folder(heads, config.target.name, config.resources, run)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    target = open_target(config.target, config.resources, config.dtype, config.device)
    nodes = max(policy.max_nodes for policy in policies)
    decoder = open_decoder(target, heads, folder, capacity_for(prompts, config.decoding.max_new_tokens, nodes))
    warm = replace(config.decoding, max_new_tokens=min(config.bench.warmup_tokens, config.decoding.max_new_tokens))

    def decode(index: int, prompt: dict, decoding):
        if index == 0 and config.policy.kind == "ar":
            return decoder.plain(prompt["token_ids"], decoding, prompt["id"])
        return decoder.generate(prompt["token_ids"], policies[index], decoding, prompt["id"])

    order = list(range(len(policies)))
    for index in order:
        decode(index, prompts[0], warm)
    runs: list[list] = [[] for _ in policies]
    for number, prompt in enumerate(prompts):
        shift = number % len(order)
        for index in order[shift:] + order[:shift]:
            runs[index].append(decode(index, prompt, config.decoding))
    return [
        _counts(
            policy,
            [(step.tree, step.accepted) for generation in made for step in generation.steps],
            sum(len(generation.tokens) for generation in made),
            1000 * sum(generation.prefill_seconds + generation.decode_seconds for generation in made),
            len(prompts),
        )
        for policy, made in zip(policies, runs, strict=True)
    ]


def _heads(config: Config, kind: str) -> HeadsConfig:
    """The configuration of the policy's kind of heads, which need not be the job's own `heads`."""
    from entmtp.layout import compose_heads

    own = [item for item in HydraConfig.get().overrides.task if not item.startswith("heads=")]
    app = GlobalHydra.instance().hydra
    try:
        return compose_heads(config, own, kind)
    finally:
        GlobalHydra.instance().hydra = app  # composing cleared it; this job's own Hydra goes on


def _counts(policy, steps: list[tuple[int, int]], tokens: int, milliseconds: float, prompts: int) -> dict:
    # a grown tree goes by its number of nodes
    sizes = [tree.num_nodes for tree in policy.trees] or list(range(policy.max_nodes + 1))
    uses = [0] * len(sizes)
    for tree, _ in steps:
        uses[tree] += 1
    mean = sum(accepted for _, accepted in steps) / len(steps) if steps else 0.0
    return {
        "prompts": prompts, "tokens": tokens, "steps": len(steps), "num_accepted": mean, "accept_length": mean + 1,
        "milliseconds": milliseconds, "tokens_per_s": 1000 * tokens / milliseconds if milliseconds else 0.0,
        "trees": sizes, "shares": [use / max(1, len(steps)) for use in uses],
    }  # fmt: skip


@hydra.main(config_path=str(CONF), config_name="sweep", version_base="1.3")
def job(raw: DictConfig) -> float:
    """One Hydra job. Returns tokens/s (0 when skipped), an objective for sweepers that look for one."""
    from entmtp.tracking import track_sweep_job

    settings = HydraConfig.get()
    overrides = list(settings.overrides.task)
    multirun = settings.mode is not None and settings.mode.name == "MULTIRUN"
    try:
        config = validate(raw)
        row = {**run_job(config), "overrides": overrides, "job": settings.job.num if multirun else 0}
        path = Path(settings.runtime.output_dir) / "row.json"
        write_json(path, row)
        sweep = (str(settings.sweep.dir), started(settings.sweep.dir)) if multirun else ()
        track_sweep_job(config.tracking, overrides, row, *sweep)
    except EntmtpError as error:
        if "SUBMITIT_EXECUTOR" in os.environ:
            raise  # on another machine: the result file carries it to the sweep's own process, which says it
        # ends the whole multirun at the first job that cannot work
        raise SystemExit(f"error: {error}") from error
    speed = f"{row['tokens_per_s']:.2f} tokens/s" if row["status"] == "ok" else f"skipped: {row['reason']}"
    print(f"#{row['job']} {' '.join(overrides)}: {speed}{'' if multirun else f' ({path})'}", flush=True)
    return row.get("tokens_per_s", 0.0)


def main() -> None:
    """Check names, run Hydra, and say what is wrong in one line."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach this function instead of being printed by Hydra
    try:
        refuse_aliases(CONF)
        for override in sys.argv[1:]:
            group, _, names = override.lstrip("+~").partition("=")
            ours = (CONF / group).is_dir() and not group.startswith("hydra/")  # plugins add to Hydra's own groups
            if ours and names and not set("()[]{}") & set(names):  # plain lists of names only
                for name in names.split(","):
                    check_choice(group, name)
        job()
    except EntmtpError as error:
        sys.exit(f"error: {error}")
    except HydraException as error:
        # a launcher's cause would be another process's traceback
        cause = f" ({error.__cause__})" if isinstance(error.__cause__, OmegaConfBaseException) else ""
        absent = "'hydra/launcher/submitit_" in str(error).partition("\n")[0]
        hint = "; pip install -e '.[cluster]'" if absent else ""
        sys.exit(f"error: config: {' '.join(f'{error}{cause}'.split())}{hint}")
    except OSError as error:  # Hydra's own folders
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not type(error).__module__.startswith("submitit"):
            raise
        sys.exit(f"error: a job of the sweep did not finish: {first_line(error)}")


if __name__ == "__main__":
    from entmtp.sweep import main as run  # under its own name, so that launchers can pickle the job by reference

    run()
