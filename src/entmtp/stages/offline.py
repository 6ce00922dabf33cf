"""Stages before the bench: target, prompts, texts, traces, trees, latency, banks, policies."""

from pathlib import Path

from entmtp.config import (
    BankConfig,
    BenchConfig,
    DecodingConfig,
    HeadsConfig,
    LatencyConfig,
    PolicyConfig,
    SearchConfig,
    TargetConfig,
    TaskConfig,
    from_plain,
)
from entmtp.errors import EntmtpError
from entmtp.evaluation.schema import check_schema
from entmtp.io import read_json, read_parquet, write_json, write_parquet
from entmtp.stages.common import open_block, read_trees


def target(inp, out, params) -> None:
    from entmtp.session import fetched

    fetched(from_plain(TargetConfig, params["target"]), params["resources"])


def prompts(inp, out, params) -> None:
    from entmtp.io import write_jsonl
    from entmtp.target.load import load_tokenizer
    from entmtp.tasks import build_prompts

    config = from_plain(TargetConfig, params["target"])
    tokenizer = load_tokenizer(Path(inp.target).parent, config.chat_template)
    rows = build_prompts(from_plain(TaskConfig, params["task"]), tokenizer, params["resources"])
    write_jsonl(out.prompts, rows)
    print(f"{len(rows)} prompts", flush=True)


def texts(inp, out, params) -> None:
    """The target's continuations of a split's prompts (batched: the text does not depend on how it is made)."""
    from entmtp.calibration.texts import calibration_texts
    from entmtp.tasks import read_prompts

    base, _ = open_block(params)
    decoding = from_plain(DecodingConfig, params["decoding"])
    write_parquet(out.texts, calibration_texts(base, read_prompts(inp.prompts, params["split"]), decoding))


def traces(inp, out, params) -> None:
    from entmtp.calibration.texts import trace_rows
    from entmtp.tasks import read_prompts

    prompts_ = read_prompts(inp.prompts)
    decoding = from_plain(DecodingConfig, params["decoding"])
    frame = read_parquet(inp.texts)
    longest = max(len(p["token_ids"]) for p in prompts_) + decoding.max_new_tokens
    base, decoder = open_block(params, str(Path(inp.heads).parent), longest)
    tie = from_plain(BenchConfig, params["bench"]).tie_margin[params["dtype"]]
    texts_ = {row["prompt_id"]: list(row["tokens"]) for row in frame.to_dict("records")}
    write_parquet(out.traces, trace_rows(base, decoder, prompts_, texts_, decoding, tie))


def growth(inp, out, params) -> None:
    """Full expansions along the calibration texts, for policies that grow their trees."""
    from entmtp.calibration.growth import save_growth
    from entmtp.calibration.growth_traces import growth_of
    from entmtp.tasks import read_prompts

    prompts_ = read_prompts(inp.prompts, "calib")
    texts_ = {row["prompt_id"]: list(row["tokens"]) for row in read_parquet(inp.texts).to_dict("records")}
    longest = max(len(p["token_ids"]) + len(texts_[p["id"]]) for p in prompts_)
    base, decoder = open_block(params, str(Path(inp.heads).parent), longest)
    save_growth(growth_of(base, decoder, prompts_, texts_, **params["growth"]), out.growth)


def frontier(inp, out, params) -> None:
    from entmtp.calibration.replay import ReplayObserver, Trace
    from entmtp.calibration.search import frontier_json, search_frontier

    config, heads = from_plain(SearchConfig, params["search"]), from_plain(HeadsConfig, params["heads"])
    if config.engine == "replay":
        observer = ReplayObserver(Trace.from_frame(read_parquet(inp.traces)))
    else:
        observer = _live_observer(inp, params, config)
    depths = [depth for depth in config.depths if depth <= heads.depth]
    if depths != config.depths:
        raise EntmtpError(f"search.depths={config.depths}: the heads have depth {heads.depth}; use depths up to that")
    write_json(out.frontier, frontier_json(search_frontier(observer, config, heads.width), config))


def _live_observer(inp, params, config: SearchConfig):
    from entmtp.calibration.rollout import LiveObserver
    from entmtp.session import capacity_for
    from entmtp.tasks import read_prompts

    chosen = read_prompts(inp.prompts, "calib")[: config.rollout_prompts]
    decoding = from_plain(DecodingConfig, params["decoding"])
    union = 2 * config.max_nodes + 2  # nodes of the largest union tree
    _, decoder = open_block(params, str(Path(inp.heads).parent), capacity_for(chosen, decoding.max_new_tokens, union))
    return LiveObserver(decoder, chosen, decoding)


def recalibrate(inp, out, params) -> None:
    from entmtp.calibration.replay import Trace
    from entmtp.calibration.search import recalibrated_json

    trace = Trace.from_frame(read_parquet(inp.traces))
    write_json(out.recalibrated, recalibrated_json(read_json(inp.frontier), trace, params["task"], params["kind"]))


def latency(inp, out, params) -> None:
    from entmtp.calibration.latency import PROMPT, measure_latency
    from entmtp.target.load import load_tokenizer
    from entmtp.tasks import encode

    config, decoding = from_plain(LatencyConfig, params["latency"]), from_plain(DecodingConfig, params["decoding"])
    # one of our own, not of the tasks: the table serves all of them, and another task's run must not measure it anew
    tokenizer = load_tokenizer(Path(inp.target).parent, from_plain(TargetConfig, params["target"]).chat_template)
    prompt = encode(tokenizer, [{"role": "user", "content": PROMPT}])
    need = max(max(config.contexts), len(prompt) + decoding.max_new_tokens) + max(config.sizes) + 16
    base, decoder = open_block(params, str(Path(inp.heads).parent), need)
    table = measure_latency(decoder, config, prompt, decoding)
    import torch

    write_json(out.latency, {"dtype": base.dtype_name, "threads": torch.get_num_threads(),
                             "context": config.contexts[0], **table})  # fmt: skip


def throughput(inp, out, params) -> None:
    from dataclasses import replace

    from entmtp.calibration import throughput as stage
    from entmtp.calibration.latency_table import LatencyTable
    from entmtp.calibration.replay import Trace
    from entmtp.session import capacity_for
    from entmtp.tasks import read_prompts
    from entmtp.tree.topology import Tree, largest

    config, decoding = from_plain(BankConfig, params["bank"]), from_plain(DecodingConfig, params["decoding"])
    trace = Trace.from_frame(read_parquet(inp.traces))
    trees = [Tree(()), *read_trees(inp.recalibrated)]
    rows = stage.predict(trees, trace, LatencyTable.from_json(read_json(inp.latency)))
    chosen = stage.choose_shortlist(rows, config.shortlist)
    timed = stage.timing_prompts(read_prompts(inp.prompts, "calib"), config.prompts, params["seed"])
    short = replace(decoding, max_new_tokens=min(config.max_new_tokens, decoding.max_new_tokens))
    capacity = capacity_for(timed, short.max_new_tokens, largest(trees))
    base, decoder = open_block(params, str(Path(inp.heads).parent), capacity)
    exact = base.dtype_name == "float32" and decoding.mode != "typical"
    compared = stage.measure(decoder, rows, chosen, timed, short, params["task"], trace if exact else None)
    if compared["different"]:  # no margins are looked at here: whether it is one, `check_replay` says
        print(f"warning: {compared['different']} live runs took other steps than replay (numerical ties, or a defect)",
              flush=True)  # fmt: skip
    # tokens before a step in the mean: what measured milliseconds are of
    context = sum(len(prompt["token_ids"]) for prompt in timed) / len(timed) + short.max_new_tokens / 2
    write_json(out.throughput, {"task": params["task"], "heads": params["kind"], "context": context,
                                "replay_check": compared, "trees": rows})  # fmt: skip


def bank(inp, out, params) -> None:
    from entmtp.tree.bank import Bank, build_bank

    config = from_plain(BankConfig, params["bank"])
    trees = build_bank(read_json(inp.throughput)["trees"], config)
    made = Bank(params["task"], params["kind"], config.basis, trees).to_json()
    check_schema(made, "bank")
    write_json(out.bank, made)


def policy(inp, out, params) -> None:
    from entmtp.calibration.growth import load_growth
    from entmtp.calibration.latency_table import LatencyTable
    from entmtp.calibration.replay import Trace
    from entmtp.policy.fit import GROWING, fit_policy
    from entmtp.tree.bank import Bank

    config = from_plain(PolicyConfig, params["policy"])
    if config.kind in ("ar", "static"):
        write_json(out.policy, fit_policy(config, None, None, None))
        return
    trace = Trace.from_frame(read_parquet(inp.traces))
    if config.kind in GROWING:
        trace.growth = load_growth(inp.growth)
    fitted = fit_policy(config, Bank.load(inp.bank), trace, LatencyTable.from_json(read_json(inp.latency)))
    check_schema(fitted, "policy")
    write_json(out.policy, fitted)
    print(f"{config.name}: {fitted['calib_tokens_per_s']:.2f} tokens/s replayed on the calibration split "
          f"(best static tree {fitted['star_tokens_per_s']:.2f})", flush=True)  # fmt: skip
