"""`python -m entmtp.peers.bench experiment=main`: our decoding beside what a user would pick instead.

Every peer has a process of its own with the same model, and they take turns prompt by prompt, so that only one computes
at a time. Prompts are the first test prompts of the run's tasks; our policies are those that the run fitted, the
fastest one of each task by its summary. Writes peers.json and peers.md into `results`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from entmtp.command import run_command
from entmtp.config import Config, compose, to_plain
from entmtp.errors import EntmtpError
from entmtp.evaluation.bench import rotated
from entmtp.evaluation.stats import ratio_interval
from entmtp.evaluation.tables import markdown_table
from entmtp.io import read_json, write_json, write_text
from entmtp.peers.worker import PEERS

PLAIN, BEST = "entmtp plain", "entmtp best"
PROMPTS, NEW_TOKENS, WARMUP = 6, 128, 8


class Peer:
    """A worker process. `problem` says why it cannot take part, else None."""

    def __init__(self, name: str, setting: dict):
        self.name = name
        command = [sys.executable, "-m", "entmtp.peers.worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        first = self._ask({**setting, "peer": name})
        self.problem = first.get("error")

    def _ask(self, question: dict) -> dict:
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EntmtpError(f"peer '{self.name}' ended with status {self.process.wait()}; its messages are above")
        return json.loads(line)

    def generate(self, task: str, prompt: list[int], max_new_tokens: int) -> dict:
        return self._ask({"task": task, "prompt": prompt, "max_new_tokens": max_new_tokens})

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def fastest(summary: dict, policies: list[str]) -> dict[str, tuple[str, str]]:
    """Per task the (heads, name) of the fastest lossless policy with fitted trees."""
    found: dict[str, dict] = {}
    for row in summary["rows"]:
        ours = row["heads"] and row["policy"] in policies and row["lossless"] in ("exact", "tie")
        if ours and row["tokens_per_s"] > found.get(row["task"], {"tokens_per_s": 0.0})["tokens_per_s"]:
            found[row["task"]] = row
    return {task: (row["heads"], row["policy"]) for task, row in found.items()}


def measure(peers: list[Peer], prompts: dict[str, list[list[int]]], max_new_tokens: int) -> list[dict]:
    """Rows {peer, task, prompt, tokens, seconds}, peers in rotated order."""
    rows = []
    for task, own in prompts.items():
        for peer in peers:  # each task anew: our best has a policy of its own there
            peer.generate(task, own[0], min(WARMUP, max_new_tokens))
        for number, prompt in enumerate(own):
            for peer in rotated(peers, number):
                run = peer.generate(task, prompt, max_new_tokens)
                rows.append({"peer": peer.name, "task": task, "prompt": number, **run})
                print(f"peers {task}: prompt {number + 1}/{len(own)}, {peer.name}: "
                      f"{len(run['tokens']) / run['seconds']:.1f} tokens/s", flush=True)  # fmt: skip
    return rows


def compare(rows: list[dict], dtype: str, resamples: int, seed: int) -> list[dict]:
    """A row per peer and task: tokens/s, the ratio of our best policy and of our plain decoding to it (with 95%
    intervals over prompts), and the share of its texts that are our plain decoding's."""
    made = []
    order = list(dict.fromkeys(row["peer"] for row in rows))
    for task in dict.fromkeys(row["task"] for row in rows):
        by_peer: dict[str, list[dict]] = {}
        for row in sorted((row for row in rows if row["task"] == task), key=lambda row: row["prompt"]):
            by_peer.setdefault(row["peer"], []).append(row)

        def totals(name: str, by_peer=by_peer) -> tuple[list[int], list[float]]:
            return [len(row["tokens"]) for row in by_peer[name]], [row["seconds"] for row in by_peer[name]]

        for name in order:
            own = by_peer[name]
            row = {"peer": name, "dtype": dtype, "task": task, "prompts": len(own),
                   "tokens_per_s": sum(totals(name)[0]) / sum(totals(name)[1])}  # fmt: skip
            for key, ours in (("best_over", BEST), ("plain_over", PLAIN)):
                row[key] = ratio_interval(*totals(ours), *totals(name), resamples, seed)
            same = [a["tokens"] == b["tokens"] for a, b in zip(own, by_peer[PLAIN], strict=True)]
            made.append({**row, "same_text": sum(same) / len(same)})
    return made


def markdown(rows: list[dict], absent: dict[str, str], provenance: dict) -> str:
    def interval(value: dict) -> str:
        return f"{value['ratio']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"

    machine = f"{provenance['cpu']}, {provenance['threads']} threads, torch {provenance['packages']['torch']}"
    table = markdown_table(
        ["task", "dtype", "peer", "tokens/s", "our best over it", "our plain over it", "same text as our plain"],
        [[row["task"], row["dtype"], row["peer"], f"{row['tokens_per_s']:.1f}", interval(row["best_over"]),
          interval(row["plain_over"]), f"{100 * row['same_text']:.0f}%"] for row in rows],
        names=3,
    )  # fmt: skip
    notes = "".join(f"Not measured: {name} ({why}).\n" for name, why in absent.items())
    return f"# Peers: {machine}\n\n{table}\n{notes}"


def prepare(config: Config, overrides: list[str]) -> tuple[dict, dict[str, list[list[int]]]]:
    """What every worker is told, and the prompts by task."""
    from entmtp.layout import compose_heads, heads_folder, run_folder, target_folder
    from entmtp.tasks import read_prompts

    run = run_folder(config)
    if not (run / "summary.json").is_file():
        raise EntmtpError(f"{run}/summary.json: no such file; run `snakemake --cores all --config "
                          f"experiment={config.experiment}` first")  # fmt: skip
    prompts = {task: [row["token_ids"] for row in read_prompts(run / f"prompts/{task}.jsonl", "test")[:PROMPTS]]
               for task in config.tasks}  # fmt: skip
    if config.device != "cpu":
        raise EntmtpError(f"device={config.device}: peers are compared on the CPU; add device=cpu")
    policies = fastest(read_json(run / "summary.json"), config.policies)
    without = [task for task in config.tasks if task not in policies]
    if without:
        raise EntmtpError(
            f"{run}: no lossless policy with draft heads was timed on {', '.join(without)}, so there is no best one to "
            "compare; choose another experiment, or policies=… with draft heads"
        )
    kinds = sorted({kind for kind, _ in policies.values()})
    heads = {kind: compose_heads(config, overrides, kind) for kind in kinds}
    budget = min(NEW_TOKENS, config.decoding.max_new_tokens)
    longest = max(len(prompt) for own in prompts.values() for prompt in own)
    folders = {
        kind: str(heads_folder(block, config.target.name, config.resources, run)) for kind, block in heads.items()
    }
    setting = {
        "target": to_plain(config)["target"],
        "resources": config.resources,
        "folder": str(target_folder(config.target, config.resources)),
        "run": str(run),
        "policies": policies,
        "heads": {kind: to_plain(block) for kind, block in heads.items()},
        "heads_folders": folders,
        "capacity": longest + budget + 80,
        "max_new_tokens": budget,
    }
    return setting, prompts


def main(overrides: list[str]) -> None:
    from entmtp.provenance import provenance

    config = compose(overrides)
    setting, prompts = prepare(config, overrides)
    threads = config.threads or os.cpu_count()
    dtypes = [item.partition("=")[2] for item in overrides if item.startswith("dtype=")][-1:] or ["float32", "bfloat16"]
    rows, absent = [], {}
    for dtype in dtypes:
        peers = [Peer(name, {**setting, "dtype": dtype, "threads": threads}) for name in PEERS]
        absent |= {peer.name: peer.problem for peer in peers if peer.problem}
        there = [peer for peer in peers if not peer.problem]
        missing = {PLAIN, BEST} - {peer.name for peer in there}
        if missing:
            raise EntmtpError(f"peers: {', '.join(sorted(missing))} cannot run: {absent}")
        timed = measure(there, prompts, setting["max_new_tokens"])
        rows += compare(timed, dtype, config.bench.bootstrap, config.seed)
        for peer in there:
            peer.close()
    made = provenance({"target": config.target.name, "device": "cpu", "dtype": ", ".join(dtypes)})
    made["threads"] = threads
    folder = Path(config.results)
    write_json(folder / "peers.json", {"rows": rows, "policies": setting["policies"],
                                        "max_new_tokens": setting["max_new_tokens"], "absent": absent,
                                        "provenance": made})  # fmt: skip
    text = markdown(rows, absent, made)
    write_text(folder / "peers.md", text)
    print(text)


if __name__ == "__main__":
    run_command(main, __doc__)
