"""Stages of the draft heads: made at random, converted or trained, and judged."""

from dataclasses import asdict, replace
from pathlib import Path

from entmtp.config import BenchConfig, CorpusConfig, DecodingConfig, HeadsConfig, PlotConfig, PromptSource, from_plain
from entmtp.errors import EntmtpError
from entmtp.evaluation.schema import check_schema
from entmtp.io import read_json, read_jsonl, read_parquet, write_json, write_jsonl, write_parquet
from entmtp.provenance import provenance
from entmtp.stages.common import open_block, read_trees


def random_heads(inp, out, params) -> None:
    """Untrained heads for the smoke experiment: the target's own next-token prediction, slightly perturbed."""
    import torch

    from entmtp.heads.model import DraftHeads, HeadsFormat, save_heads
    from entmtp.heads.prefix import prefix_like

    config, (base, _) = from_plain(HeadsConfig, params["heads"]), open_block(params)
    size = min(config.train.draft_vocab, base.vocab_size)
    prefix = asdict(prefix_like(base.config)) if config.prefix else None
    heads = DraftHeads(
        HeadsFormat(config.arch, config.depth, config.blocks, base.hidden_size, size, base.fingerprint, prefix=prefix),
        torch.arange(size),
    )
    heads.reset(config.train.seed)
    save_heads(heads, Path(out.heads).parent)


def convert_heads(inp, out, params) -> None:
    """A published checkpoint (Hub or folder) to the native format."""
    from entmtp.heads.convert import convert_published
    from entmtp.heads.drafter import make_drafter
    from entmtp.heads.model import load_heads
    from entmtp.heads.self_test import warn_if_implausible

    config, (base, _) = from_plain(HeadsConfig, params["heads"]), open_block({**params, "device": "cpu"})
    folder = Path(out.heads).parent
    convert_published(config, base, folder)
    warn_if_implausible(base, make_drafter(load_heads(folder, base), base, config.width), f"the heads in {folder}")


def heads_prompts(inp, out, params) -> None:
    """Training prompts that the target writes itself."""
    from entmtp.heads.self_prompts import finished, write_self_prompts

    (base, _), corpus = open_block(params), from_plain(CorpusConfig, params["corpus"])
    journal = write_self_prompts(base, corpus, Path(out.prompts).with_suffix(".journal"))
    write_jsonl(out.prompts, finished(journal, corpus))
    journal.remove()


def corpus_of(inp, params) -> CorpusConfig:
    """The rule's corpus, self-written prompts (a file among the inputs) joined to its sources."""
    corpus = from_plain(CorpusConfig, params["corpus"])
    own = [PromptSource(file=path, column="prompt", task="self") for path in inp.self_prompts]
    return replace(corpus, prompts=[*corpus.prompts, *own])


def heads_text(inp, out, params) -> None:
    """One shard of head-training text."""
    from entmtp.heads.corpus import write_shard

    base, _ = open_block(params)
    journal = write_shard(
        base, corpus_of(inp, params), list(inp.prompts), params["shard"], Path(out.text).with_suffix(".journal")
    )
    write_jsonl(out.text, journal.rows)
    journal.remove()


def heads_features(inp, out, params) -> None:
    """One shard of training features."""
    from entmtp.heads.features import compute_shard, write_shard_features

    base, _ = open_block(params)
    shard = compute_shard(base, read_jsonl(inp.text), from_plain(CorpusConfig, params["corpus"]))
    write_shard_features(shard, out.features)


def train_heads(inp, out, params) -> None:
    from entmtp.heads.recipe import train_recipe

    config, (base, _) = from_plain(HeadsConfig, params["heads"]), open_block(params)
    files = {name: list(getattr(inp, name)) for name in ("texts", "features", "prompts")}
    train_recipe(base, config, corpus_of(inp, params), files, Path(out.heads).parent, params["command"])


def heads_vocabulary(inp, out, params) -> None:
    """The trade-off between what a draft vocabulary covers and what it costs."""
    from entmtp.heads import vocabulary
    from entmtp.heads.features import Features
    from entmtp.heads.model import load_heads

    config, (base, _) = from_plain(HeadsConfig, params["heads"]), open_block(params)
    if inp.features:
        ordered = vocabulary.of_training_text(Features.open(list(inp.features)), base.vocab_size)
    else:
        texts = {
            task: read_parquet(path)["tokens"].tolist() for task, path in zip(params["tasks"], inp.texts, strict=True)
        }
        ordered = vocabulary.of_heads(load_heads(Path(inp.heads).parent, base).token_map, base.vocab_size, texts)
    plain_ms = vocabulary.plain_step_ms(base, params["repeats"])
    sizes = [2**n for n in range(9, 20) if 2**n >= config.width]
    rows = vocabulary.vocabulary_curve(base, ordered, sizes, config, plain_ms, params["repeats"])
    write_json(out.curve, {"dtype": base.dtype_name, "plain_ms": plain_ms, "knee": vocabulary.knee(rows), "rows": rows})


def heads_vocabulary_figure(inp, out, params) -> None:
    from entmtp.evaluation.figures import save_figure
    from entmtp.evaluation.figures_machine import vocabulary_curve

    curve = read_json(inp.curve)
    figure = vocabulary_curve(curve["rows"], curve["knee"], from_plain(PlotConfig, params["plot"]))
    save_figure(figure, Path(out.figure[0]).with_suffix(""))


def heads_eval(inp, out, params) -> None:
    """One kind of heads on one task."""
    from entmtp.calibration.latency_table import LatencyTable
    from entmtp.calibration.replay import Trace
    from entmtp.calibration.texts import trace_rows
    from entmtp.heads.evaluate import evaluate_heads
    from entmtp.session import capacity_for
    from entmtp.tasks import read_prompts
    from entmtp.tree.topology import largest

    decoding, bench = from_plain(DecodingConfig, params["decoding"]), from_plain(BenchConfig, params["bench"])
    prompts, trees = read_prompts(inp.prompts, "test"), read_trees(inp.recalibrated)
    base, decoder = open_block(params, str(Path(inp.heads).parent),
                               capacity_for(prompts, decoding.max_new_tokens, largest(trees)))  # fmt: skip
    texts = {row["prompt_id"]: list(row["tokens"]) for row in read_parquet(inp.texts).to_dict("records")}
    tie = bench.tie_margin[params["dtype"]]
    test = Path(out.rows).with_suffix(".traces.parquet")
    write_parquet(test, trace_rows(base, decoder, prompts, texts, decoding, tie))
    traces = [Trace.from_frame(read_parquet(path)) for path in (inp.traces, test)]
    options = {"bootstrap": bench.bootstrap, "seed": params["seed"], "repeats": params["repeats"],
               "live_prompts": params["live_prompts"]}  # fmt: skip
    latency = LatencyTable.from_json(read_json(inp.latency))
    rows = evaluate_heads(decoder, trees, *traces, prompts, latency, decoding, options)
    live = [row["live"] for row in rows if row["live"] and row["live"]["prompts_that_differ"]]
    if live and params["dtype"] == "float32":
        raise EntmtpError(f"{params['kind']}, {params['task']}: live steps differ from replay ({live[0]})")
    write_json(out.rows, [{"heads": params["kind"], "task": params["task"], **row} for row in rows])


def heads_report(inp, out, params) -> None:
    """All kinds on all tasks: heads.json, and the geometric mean over tasks of each kind's 16-node tree."""
    from entmtp.evaluation.stats import geometric_mean

    rows = [row for path in inp.rows for row in read_json(path)]
    means = {}
    for kind in dict.fromkeys(row["heads"] for row in rows):
        own = [row["num_accepted"] for row in rows if row["heads"] == kind and row["size"] == params["size"]]
        means[kind] = geometric_mean(own) if own and min(own) > 0 else 0.0
    made = {"size": params["size"], "geometric_mean_num_accepted": means, "rows": rows,
            "provenance": provenance(params["config"], threads=read_json(inp.latency)["threads"])}  # fmt: skip
    check_schema(made, "heads")
    write_json(out.report, made)
    print(f"heads: num_accepted of {params['size']} nodes, geometric mean over tasks: {means}", flush=True)
