"""`python -m entmtp.engine_bench`: how far our forwards are from what this machine can do.

Measures what the machine reads and multiplies a second, derives the floors of a step from it, and times our forward for
n drafted nodes at several contexts, and every part of a whole step; and counts how often a token's choice is another
one in a forward of 16 drafted nodes than alone. Writes engine.json, engine.md and engine.png into `results`. Hydra
overrides apply (`target=…`, `heads=…`, `threads=2`, `device=cuda`); float32 and bfloat16 are both measured unless
`dtype=` names one.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from entmtp.calibration.latency import PROMPT
from entmtp.command import run_command
from entmtp.config import Config, DecodingConfig, compose
from entmtp.decoding.engine import Decoder, make_chooser
from entmtp.engine_flips import flips
from entmtp.evaluation.tables import markdown_table
from entmtp.io import write_json, write_text
from entmtp.policy.schedulers import LadderPolicy
from entmtp.target.cache import KVCache
from entmtp.timing import fastest_ms, median_ms, settle, waiting
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.defaults import DEFAULT_TREES
from entmtp.tree.topology import Tree

NODES = [0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
SOME = [0, 4, 16]
CONTEXTS = {128: NODES, 512: NODES, 2048: NODES, 4096: SOME, 8000: SOME}  # drafted nodes by context
REPEATS = 15
FLIP_PROMPTS = 8
PARTS = ("propose", "verify", "accept", "commit", "scheduler")


@torch.inference_mode()
def machine(dtype: torch.dtype, device: str) -> dict:
    """gb_per_s that the machine reads (a sum over half a gigabyte), gflop_per_s of large matrix products in `dtype`."""
    big = torch.ones(128 * 1024 * 1024, device=device)
    a, b = (torch.randn(2048, 2048, device=device).to(dtype) for _ in range(2))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "gb_per_s": big.numel() * 4 / 1e6 / fastest_ms(waiting(big.sum, device), 7),
        "gflop_per_s": 2 * 2048**3 / 1e6 / fastest_ms(waiting(lambda: a @ b, device), 3, warmup=1),
    }


def step_bytes(target, context: int) -> tuple[int, int]:
    """(weights, keys and values) that a step has to read once."""
    m, size = target.model, target.dtype.itemsize
    kv_width, q_width = m.kv_heads * m.head_dim, m.heads * m.head_dim
    layer = m.hidden_size * (q_width + 2 * kv_width) + q_width * m.hidden_size
    layer += 3 * m.hidden_size * m.intermediate_size
    weights = m.layers * layer + target.vocab_size * m.hidden_size
    return weights * size, 2 * m.layers * kv_width * context * size


@torch.inference_mode()
def forward_table(target) -> tuple[dict, list[dict]]:
    """The machine's rates, and a row per context and number of nodes of the whole forward, vocabulary head included.

    `floor_ms` is the time to read weights and cache once, `compute_ms` to multiply so many rows. The rates are measured
    before each context and the best of them counts: a floor is what no step can beat, in no minute of the run.
    """
    rates, rows = [], []
    for context, counts in CONTEXTS.items():
        if context + max(counts) >= target.max_positions:
            continue
        cache = target.new_cache(context + max(counts) + 1)
        cache.length = context
        rates.append(machine(target.dtype, target.device))
        for nodes in counts:
            tree = CompiledTree(Tree.of([(rank,) for rank in range(nodes)]), target.mask_rows, cache.capacity,
                                target.dtype, target.device)  # fmt: skip
            tokens = torch.arange(tree.n, device=target.device) % target.vocab_size
            at, mask = tree.depths + context, tree.mask_slice(context)
            step = partial(_forward, target, tokens, at, cache, mask)
            ms = median_ms(waiting(step, target.device), REPEATS)
            rows.append({"dtype": target.dtype_name, "context": context, "nodes": nodes, "stage": "forward", "ms": ms})
        print(f"{target.dtype_name}, context {context}: plain {rows[-len(counts)]['ms']:.1f} ms", flush=True)
    best = {key: max(rate[key] for rate in rates) for key in rates[0]}
    for row in rows:
        weights, kv = step_bytes(target, row["context"])
        row["floor_ms"] = (weights + kv) / 1e6 / best["gb_per_s"]
        row["compute_ms"] = 2 * (row["nodes"] + 1) * weights / target.dtype.itemsize / 1e6 / best["gflop_per_s"]
    return best, rows


def _forward(target, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor:
    return target.model.logits(target.model.hidden(tokens, positions, cache, mask))


@torch.inference_mode()
def step_parts(decoder: Decoder, tree: Tree, prompt: list[int], decoding: DecodingConfig) -> list[dict]:
    """A row per part of a step of real decoding with one tree: mean milliseconds. `scheduler` is the signal of a ladder
    that looks two heads deep, and its choice."""
    _decode_in_parts(decoder, tree, prompt, decoding)  # warm-up
    steps, seconds = _decode_in_parts(decoder, tree, prompt, decoding)
    context = len(prompt) + decoding.max_new_tokens // 2
    return [{"dtype": decoder.target.dtype_name, "context": context, "nodes": tree.num_nodes, "stage": stage,
             "ms": 1000 * seconds[stage] / steps, "floor_ms": None, "compute_ms": None} for stage in PARTS]  # fmt: skip


def _decode_in_parts(
    decoder: Decoder, tree: Tree, prompt: list[int], decoding: DecodingConfig
) -> tuple[int, dict[str, float]]:
    """Steps, and seconds of each of the decoder's parts over all of them."""
    target, drafter, cache = decoder.target, decoder.drafter, decoder.cache
    compiled, chooser = decoder.compile(tree), make_chooser(target, decoding, "")
    ladder = LadderPolicy("ladder", [tree, tree], depth=2, thresholds=[0.5])  # it switches, to a tree of the same shape
    seconds, steps = dict.fromkeys(PARTS, 0.0), 0
    cache.reset()
    drafter.reset()
    hidden = target.prefill(prompt, cache)
    logits = target.model.logits(hidden[-1:])
    root, end = chooser(logits, [len(prompt)])[0], cache.length + decoding.max_new_tokens

    def timed(stage: str, run: Callable):
        settle(target.device)
        begin = time.perf_counter()
        made = run()
        settle(target.device)
        seconds[stage] += time.perf_counter() - begin
        return made

    def propose() -> Tensor:
        drafter.start(hidden, root)
        drafter.extend(ladder.depth)
        return decoder.propose(compiled, root)

    def decide() -> int:
        return ladder.decide(decoder._path_values(ladder, logits))

    while cache.length < end:
        drafted = timed("propose", propose)
        timed("scheduler", decide)
        all_hidden, all_logits = timed("verify", partial(decoder.forward, compiled, drafted))
        accept = partial(decoder.accept, compiled, logits=all_logits, chooser=chooser, decoding=decoding)
        nodes, root = timed("accept", lambda: accept(drafted.tolist()))  # noqa: B023
        timed("commit", partial(cache.commit, nodes))
        hidden, logits = all_hidden[nodes], all_logits[nodes[-1] : nodes[-1] + 1]
        steps += 1
    return steps, seconds


def measure(config: Config, dtype: str) -> tuple[dict, list[dict], dict]:
    """The machine's rates, the rows of one dtype, and its flips on the first prompts of the task."""
    from entmtp.layout import heads_folder, run_folder
    from entmtp.session import open_decoder, open_target
    from entmtp.tasks import build_prompts, encode

    target = open_target(config.target, config.resources, dtype, config.device)
    folder = heads_folder(config.heads, config.target.name, config.resources, run_folder(config))
    prompt = encode(target.tokenizer, [{"role": "user", "content": PROMPT}])
    decoder = open_decoder(target, config.heads, folder, Decoder.room(len(prompt), 160, 64))
    parts = [step_parts(decoder, DEFAULT_TREES[name], prompt, DecodingConfig(max_new_tokens=96))
             for name in ("chain_4", "fixed_16")]  # fmt: skip
    rates, rows = forward_table(target)
    prompts = [row["token_ids"] for row in build_prompts(config.task, target.tokenizer, config.resources)]
    return rates, [*rows, *parts[0], *parts[1]], flips(target, prompts[:FLIP_PROMPTS])


def markdown(rates: list[dict], rows: list[dict], flipped: list[dict], provenance: dict) -> str:
    lines = [
        f"# Engine: {provenance['cpu']}, {provenance['threads']} threads, torch {provenance['packages']['torch']}",
        "",
    ]
    for rate, flip in zip(rates, flipped, strict=True):
        own = [row for row in rows if row["dtype"] == rate["dtype"]]
        forward = [row for row in own if row["stage"] == "forward"]
        plain = {row["context"]: row["ms"] for row in forward if row["nodes"] == 0}
        table = [
            [str(row["context"]), str(row["nodes"]), f"{row['ms']:.2f}", f"{row['ms'] / row['floor_ms']:.2f}",
             f"{row['ms'] / plain[row['context']]:.2f}", f"{row['compute_ms']:.2f}"] for row in forward
        ]  # fmt: skip
        heading = ["context", "nodes", "ms", "over the read-once floor", "over the plain step", "compute floor ms"]
        by_tree: dict[int, dict[str, float]] = {}
        for row in own:
            if row["stage"] != "forward":
                by_tree.setdefault(row["nodes"], {})[row["stage"]] = row["ms"]
        parts = [[str(nodes), *(f"{ms[stage]:.2f}" for stage in PARTS)] for nodes, ms in by_tree.items()]
        lines += [
            f"## {rate['dtype']}: {rate['gb_per_s']:.1f} GB/s read, {rate['gflop_per_s']:.0f} GFLOP/s", "",
            markdown_table(heading, table), markdown_table(["nodes", *(f"{stage} ms" for stage in PARTS)], parts),
            _flips_said(flip), "",
        ]  # fmt: skip
    return "\n".join(lines)


def _flips_said(flip: dict) -> str:
    engine = "compiled engine" if flip["compiled"] else "tensor operators"
    return (
        f"{flip['flips_per_1000']:.1f} flips in a thousand tokens between forwards of {flip['nodes']} drafted nodes "
        f"and of one token ({flip['tokens']} tokens, {engine}): largest margin {flip['largest_margin']:.3g}, largest "
        f"difference of two logits {flip['largest_difference']:.3g}."
    )


def main(overrides: list[str]) -> None:
    from entmtp.evaluation.figures import save_figure
    from entmtp.evaluation.figures_machine import roofline
    from entmtp.provenance import provenance

    config = compose(overrides)
    if config.threads:
        torch.set_num_threads(config.threads)
    asked = [item.partition("=")[2] for item in overrides if item.startswith("dtype=")]
    rates, rows, flipped = [], [], []
    for dtype in asked[-1:] or ["float32", "bfloat16"]:
        rate, made, flip = measure(config, dtype)
        rates.append(rate)
        flipped.append(flip)
        rows += made
    about = provenance({"target": config.target.name, "device": config.device,
                        "dtype": ", ".join(rate["dtype"] for rate in rates)})  # fmt: skip
    about["threads"] = torch.get_num_threads()
    folder = Path(config.results)
    write_json(folder / "engine.json", {"rows": rows, "machine": rates, "flips": flipped, "provenance": about})
    text = markdown(rates, rows, flipped, about)
    write_text(folder / "engine.md", text)
    save_figure(roofline(rows, config.plot), folder / "engine")
    print(text)


if __name__ == "__main__":
    run_command(main, __doc__)
