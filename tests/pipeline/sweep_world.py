"""A run folder for sweeps: made by the stages in process, but for latency and banks."""

from types import SimpleNamespace as Files

import pytest

from entmtp.config import compose, to_plain
from entmtp.io import write_json, write_jsonl
from entmtp.stages import heads, offline
from entmtp.tree.bank import Bank, BankTree
from entmtp.tree.topology import Tree

TASKS = ("sharegpt", "litbench")
TREES = [Tree(()), Tree.of([(0,), (0, 0)]), Tree.of([(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])]
STEP_MS = (1.0, 1.1, 1.4)
LATENCY = {
    "arch": "hydra", "overhead_ms": 0.05, "plain_ms": 0.95, "signal_ms": 0.01, "grow_ms": 0.01,
    "forward": {"tokens": [1, 7], "ms": [0.9, 1.2]}, "propose": {"rows": [1, 4], "ms": [[0.02, 0.03]] * 4},
}  # fmt: skip


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Targets, prompts, heads, texts and traces by the stages; latency and banks by hand, so that speeds are known."""
    root = tmp_path_factory.mktemp("world")
    overrides = ["experiment=smoke", f"results={root / 'results'}", f"resources={root / 'resources'}"]
    config = to_plain(compose(overrides))
    run = root / "results" / "smoke"
    base = {**{key: config[key] for key in ("target", "dtype", "device", "resources", "heads", "decoding", "bench")}}
    marker = root / "resources" / "targets" / "tiny" / "entmtp.json"
    offline.target(Files(), Files(target=marker), base)
    heads.random_heads(Files(), Files(heads=run / "heads" / "hydra" / "config.json"), base)
    for task in TASKS:
        source = root / f"{task}.jsonl"
        write_jsonl(source, [{"prompt": f"{task} question number {number}?"} for number in range(5)])
        prompts, texts = run / "prompts" / f"{task}.jsonl", run / "texts" / f"{task}.parquet"
        block = {**config["task"], "name": task, "source": "file", "file": str(source), "calib": 3, "test": 2}
        offline.prompts(Files(target=marker), Files(prompts=prompts), {**base, "task": block})
        offline.texts(Files(prompts=prompts), Files(texts=texts), {**base, "split": "calib"})
        inp = Files(prompts=prompts, texts=texts, heads=run / "heads" / "hydra" / "config.json")
        offline.traces(inp, Files(traces=run / "traces" / "hydra" / f"{task}.calib.parquet"), base)
        bank = [BankTree(tree, 1.0 + 0.1 * i, 1000 + i, ms) for i, (tree, ms) in enumerate(zip(TREES, STEP_MS))]
        Bank(task, "hydra", "measured", bank).save(run / "trees" / "hydra" / task / "bank.json")
    write_json(run / "latency" / "hydra.json", LATENCY)
    return root
