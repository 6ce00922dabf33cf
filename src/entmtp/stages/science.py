"""Stages of `snakemake scheduling`: what schedulers gained, what there was to gain, what predicts it."""

from pathlib import Path

from entmtp.evaluation.schema import check_schema
from entmtp.io import read_json, read_parquet, write_json
from entmtp.provenance import provenance
from entmtp.stages.common import read_trees


def scheduling_task(inp, out, params) -> None:
    """One task's part, for the policies that draft with the judged kind of heads."""
    from entmtp.calibration.growth import load_growth
    from entmtp.calibration.latency_table import LatencyTable
    from entmtp.calibration.replay import Trace
    from entmtp.heads.held_out import fixed_tree
    from entmtp.science.banks import bank_rows
    from entmtp.science.ceiling import bank_ceiling_row, ceiling_row
    from entmtp.science.cost import forward_counts
    from entmtp.science.headroom import headroom_rows
    from entmtp.science.prices import Texts, timed_steps
    from entmtp.science.signals import signal_rows, step_table
    from entmtp.tasks import read_prompts
    from entmtp.tree.bank import Bank

    task, frontier = params["task"], read_trees(inp.recalibrated)
    bank, latency = Bank.load(inp.bank), LatencyTable.from_json(read_json(inp.latency))
    frames = {"calib": read_parquet(inp.calib), "test": read_parquet(inp.test)}
    traces = {split: Trace.from_frame(frame) for split, frame in frames.items()}
    if inp.growth:
        traces["test"].growth, traces["calib"].growth = load_growth(inp.growth[0]), load_growth(inp.calib_growth[0])
    fitted = {Path(path).stem: read_json(path) for path in inp.policies}
    throughput, prompts = read_json(inp.throughput), read_prompts(inp.prompts)
    timed = timed_steps(throughput) if bank.basis == "measured" else {}  # one clock
    prompt_tokens = {prompt["id"]: len(prompt["token_ids"]) for prompt in prompts}
    context = throughput.get("context") if timed else latency.mean_context  # where the bank's step times are of
    texts = Texts.of(traces["test"], bank, latency, timed, prompt_tokens, context)
    policies = headroom_rows(task, fitted, texts, frontier, read_parquet(inp.bench),
                             {"bootstrap": params["bootstrap"], "seed": params["seed"]})  # fmt: skip
    print(f"{task}: the oracle over the bank gains {100 * policies[0]['oracle_headroom']['gain']:.1f}% over the best "
          f"static tree, over {len(frontier)} trees {100 * policies[0]['frontier_headroom']['gain']:.1f}%",
          flush=True)  # fmt: skip
    banks = bank_rows(task, bank, frontier, traces["calib"], traces["test"], latency, params["bank_size"],
                      params["bank_tries"], timed)  # fmt: skip
    ceilings = [ceiling_row(task, policy, bank, traces["calib"], traces["test"], latency)
                for policy in fitted.values() if policy["kind"] == "marginal"]  # fmt: skip
    reference = fixed_tree(traces["calib"].depth, traces["calib"].width)
    steps = {split: step_table(traces[split], frames[split], reference, prompt_tokens) for split in frames}
    write_json(out.part, {"task": task, "policies": policies, "banks": banks, "ceiling": ceilings,
                          "bank_ceiling": [bank_ceiling_row(task, bank, traces["calib"], traces["test"])],
                          "signals": signal_rows(task, steps["calib"], steps["test"]),
                          "forwards": forward_counts(task, frontier, traces["calib"])})  # fmt: skip


def scheduling(inp, out, params) -> None:
    """All tasks: scheduling.json, the Markdown, the figures."""
    from entmtp.calibration.growth import load_growth
    from entmtp.calibration.latency_table import LatencyTable
    from entmtp.calibration.replay import Trace
    from entmtp.config import PlotConfig, from_plain
    from entmtp.evaluation.records import make_scheduling
    from entmtp.science.headroom import STAR
    from entmtp.science.prices import timed_steps
    from entmtp.science.report import combine
    from entmtp.science.transfer import Fitted, transfer_rows
    from entmtp.tree.bank import Bank

    parts, latency = [read_json(path) for path in inp.parts], LatencyTable.from_json(read_json(inp.latency))
    tasks = {}
    for number, part in enumerate(parts):
        trace = Trace.from_frame(read_parquet(inp.test[number]))
        if inp.growth:
            trace.growth = load_growth(inp.growth[number])
        folder = Path(inp.banks[number]).parent / "policy"
        names = [name for name in params["policies"] if (folder / f"{name}.json").is_file()]
        fitted = {name: read_json(folder / f"{name}.json") for name in names}
        moving = {name: value for name, value in fitted.items() if value["trees"] or value["growing"]}
        timed = timed_steps(read_json(inp.throughput[number]))
        bank = Bank.load(inp.banks[number])
        tasks[part["task"]] = Fitted(bank, moving, trace, timed if bank.basis == "measured" else {})
    draws = params["bootstrap"], params["seed"]
    record = combine(parts, transfer_rows(tasks, latency, STAR, *draws),
                     provenance(params["config"]) | {"threads": read_json(inp.latency)["threads"]}, *draws)  # fmt: skip
    check_schema(record, "scheduling")
    write_json(out.record, record)
    make_scheduling(record, from_plain(PlotConfig, params["plot"]), Path(out.markdown).parent)
    for name, means in record["geometric_mean_over_static"].items():
        gain = means["live"]["ratio"] - 1
        print(f"{name}: {100 * gain:+.1f}% over the static optimum, live, geometric mean over tasks "
              f"(worst {100 * (means['worst'] - 1):+.1f}%)", flush=True)  # fmt: skip
