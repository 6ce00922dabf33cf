"""`python -m entmtp.engine_bench`: how far our forwards are from what this machine can do.

Measures what the machine reads and multiplies a second, derives the floors of a step from it, and times our forward for
n drafted nodes at several contexts, and every part of a whole step. Writes engine.json, engine.md and engine.png into
`results/engine`. Hydra overrides apply (`target=…`, `heads=…`, `threads=2`); both dtypes are measured unless `dtype=`
names one.
"""

import time
from pathlib import Path

import torch

from entmtp.command import run_command
from entmtp.config import Config, DecodingConfig, PlotConfig, compose
from entmtp.decoding.engine import Decoder, make_chooser
from entmtp.io import write_json, write_text
from entmtp.timing import median_ms
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.defaults import DEFAULT_TREES
from entmtp.tree.topology import Tree

NODES = [0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
CONTEXTS = [128, 512, 1900]
REPEATS = 15


@torch.inference_mode()
def machine(dtype: torch.dtype) -> dict:
    """gb_per_s that the machine reads (a sum over half a gigabyte), gflop_per_s of large matrix products in `dtype`."""
    big = torch.ones(128 * 1024 * 1024)
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    return {
        "gb_per_s": big.numel() * 4 / 1e6 / median_ms(big.sum, 7),
        "gflop_per_s": 2 * 2048**3 / 1e6 / median_ms(lambda: a @ b, 7),
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
def forward_table(target, rates: dict) -> list[dict]:
    """A row per context and number of nodes: {context, nodes, ms, floor_ms, compute_ms}."""
    rows = []
    for context in [c for c in CONTEXTS if c + max(NODES) < target.max_positions]:
        cache = target.new_cache(context + max(NODES) + 1)
        cache.length = context
        weights, kv = step_bytes(target, context)
        floor = (weights + kv) / 1e6 / rates["gb_per_s"]
        for nodes in NODES:
            tree = CompiledTree(Tree.of([(rank,) for rank in range(nodes)]), target.mask_rows, cache.capacity,
                                target.dtype, target.device)  # fmt: skip
            tokens, at = torch.arange(tree.n) % target.vocab_size, tree.depths + context
            mask = tree.mask_slice(context)
            ms = median_ms(lambda: target.model.logits(target.model.hidden(tokens, at, cache, mask)), REPEATS)  # noqa: B023
            compute = 2 * tree.n * weights / target.dtype.itemsize / 1e6 / rates["gflop_per_s"]
            rows.append({"context": context, "nodes": nodes, "ms": ms, "floor_ms": floor, "compute_ms": compute})
        print(f"{target.dtype_name}, context {context}: plain {rows[-len(NODES)]['ms']:.1f} ms, floor {floor:.1f} ms")
    return rows


@torch.inference_mode()
def step_parts(decoder: Decoder, tree: Tree, prompt: list[int], decoding: DecodingConfig) -> dict:
    """Mean milliseconds of each part of a step of real decoding with one tree."""
    _decode_in_parts(decoder, tree, prompt, decoding)  # warm-up
    steps, seconds = _decode_in_parts(decoder, tree, prompt, decoding)
    return {"nodes": tree.num_nodes, "steps": steps, **{name: 1000 * s / steps for name, s in seconds.items()}}


def _decode_in_parts(
    decoder: Decoder, tree: Tree, prompt: list[int], decoding: DecodingConfig
) -> tuple[int, dict[str, float]]:
    """Steps, and seconds of each of the decoder's parts over all of them."""
    target, drafter, cache = decoder.target, decoder.drafter, decoder.cache
    compiled, chooser = decoder.compile(tree), make_chooser(target, decoding, "")
    seconds, steps = dict.fromkeys(("propose", "verify", "accept", "commit"), 0.0), 0
    cache.reset()
    drafter.reset()
    hidden = target.prefill(prompt, cache)
    root, end = chooser(target.model.logits(hidden[-1:]), [len(prompt)])[0], cache.length + decoding.max_new_tokens
    while cache.length < end:
        marks = [time.perf_counter()]
        drafter.start(hidden, root)
        drafted = decoder.propose(compiled, root)
        tokens = drafted.tolist()
        marks.append(time.perf_counter())
        all_hidden, logits = decoder.forward(compiled, drafted)
        marks.append(time.perf_counter())
        nodes, root = decoder.accept(compiled, tokens, logits, chooser, decoding)
        marks.append(time.perf_counter())
        cache.commit(nodes)
        hidden = all_hidden[nodes]
        marks.append(time.perf_counter())
        for name, begin, stop in zip(seconds, marks[:-1], marks[1:], strict=True):
            seconds[name] += stop - begin
        steps += 1
    return steps, seconds


def measure(config: Config, dtype: str) -> dict:
    """Everything for one dtype."""
    from entmtp.session import heads_folder, open_decoder, open_target, run_folder
    from entmtp.tasks import encode

    target = open_target(config.target, config.resources, dtype, config.device)
    rates = machine(target.dtype)
    folder = heads_folder(config.heads, config.target.name, config.resources, run_folder(config))
    prompt = encode(
        target.tokenizer, [{"role": "user", "content": "Explain how a sailing boat moves against the wind."}]
    )
    decoder = open_decoder(target, config.heads, folder, Decoder.room(len(prompt), 160, 64))
    parts = [step_parts(decoder, DEFAULT_TREES[name], prompt, DecodingConfig(max_new_tokens=96))
             for name in ("chain_4", "fixed_16")]  # fmt: skip
    return {"dtype": dtype, "machine": rates, "forward": forward_table(target, rates), "parts": parts}


def markdown(results: list[dict], provenance: dict) -> str:
    lines = [
        f"# Engine: {provenance['cpu']}, {provenance['threads']} threads, torch {provenance['packages']['torch']}",
        "",
    ]
    for result in results:
        rates = result["machine"]
        lines += [
            f"## {result['dtype']}: {rates['gb_per_s']:.1f} GB/s read, {rates['gflop_per_s']:.0f} GFLOP/s",
            "",
            "| context | nodes | ms | over the read-once floor | over the plain step | compute floor ms |",
            "| --- | --- | --- | --- | --- | --- |",
        ]  # fmt: skip
        plain = {row["context"]: row["ms"] for row in result["forward"] if row["nodes"] == 0}
        for row in result["forward"]:
            ratio = row["ms"] / plain[row["context"]]
            lines.append(f"| {row['context']} | {row['nodes']} | {row['ms']:.2f} | {row['ms'] / row['floor_ms']:.2f} | "
                         f"{ratio:.2f} | {row['compute_ms']:.2f} |")  # fmt: skip
        lines += ["", "| nodes | propose ms | verify ms | accept ms | commit ms |", "| --- | --- | --- | --- | --- |"]
        for part in result["parts"]:
            cells = " | ".join(f"{part[name]:.2f}" for name in ("propose", "verify", "accept", "commit"))
            lines.append(f"| {part['nodes']} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def main(overrides: list[str]) -> None:
    from entmtp.evaluation.figures import save_figure
    from entmtp.evaluation.figures_machine import roofline
    from entmtp.provenance import provenance

    config = compose(overrides)
    if config.threads:
        torch.set_num_threads(config.threads)
    asked = [item.partition("=")[2] for item in overrides if item.startswith("dtype=")]
    results = [measure(config, dtype) for dtype in (asked[-1:] or ["float32", "bfloat16"])]
    made = provenance({"target": config.target.name, "device": config.device, "dtype": config.dtype})
    made["threads"] = torch.get_num_threads()
    folder = Path(config.results) / "engine"
    write_json(folder / "engine.json", {"results": results, "provenance": made})
    write_text(folder / "engine.md", markdown(results, made))
    save_figure(roofline(results, PlotConfig()), folder / "engine")
    print(markdown(results, made))


if __name__ == "__main__":
    run_command(main, __doc__)
