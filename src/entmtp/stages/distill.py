"""Stages of the second method: self-distillation, block decoding, what it gains and what it costs."""

from pathlib import Path

from entmtp.config import (
    BenchConfig,
    ConfAdaptConfig,
    DecodingConfig,
    DistillConfig,
    LatencyConfig,
    MtpConfig,
    PlotConfig,
    TaskConfig,
    from_plain,
)
from entmtp.errors import EntmtpError
from entmtp.evaluation.schema import check_schema
from entmtp.io import Journal, read_json, read_parquet, sha256_file, sha256_json, write_json, write_parquet
from entmtp.provenance import provenance
from entmtp.stages.common import open_block, write_verdicts


def distill(inp, out, params) -> None:
    """A multi-token model from the target and its own calibration texts."""
    from entmtp.distill.recipe import distil
    from entmtp.tasks import read_prompts

    config, rows = from_plain(DistillConfig, params["distill"]), []
    for texts, prompts in zip(inp.texts, inp.prompts, strict=True):
        asked = {row["id"]: row["token_ids"] for row in read_prompts(prompts, "calib")}
        for row in read_parquet(texts).to_dict("records"):
            key = sha256_json([config.seed, row["prompt_id"]])[:16]
            rows.append({"key": key, "prompt_ids": asked[row["prompt_id"]], "tokens": list(map(int, row["tokens"]))})
    rows = sorted(rows, key=lambda row: row["key"])[: config.texts]
    folder = Path(out.model).parent
    checkpoint = folder.with_name(f"{folder.name}.checkpoint.pt")
    history = distil(Path(inp.target).parent, folder, checkpoint, rows, config, params["device"])
    made = provenance({"device": params["device"], "dtype": config.dtype})
    write_json(out.history, {"distill": params["distill"], "texts": len(rows), "curve": history, "provenance": made})
    checkpoint.unlink(missing_ok=True)


def multi_token_model(inp, out, params) -> None:
    """Download a published multi-token model."""
    from entmtp.session import target_folder
    from entmtp.target.fetch import fetch_target

    config = from_plain(MtpConfig, params["mtp"])
    fetch_target(config, target_folder(config, params["resources"]))


def _open_multi_token(inp, params):
    """The multi-token model of a rule's block, and its mask token."""
    from entmtp.distill.published import load_multi_token

    folder = Path(inp.model).parent  # wherever it came from
    return load_multi_token(from_plain(MtpConfig, params["mtp"]), folder, params["dtype"], params["device"])


def confadapt_latency(inp, out, params) -> None:
    """What forwards cost here: the multi-token model's, and the original's where it verifies."""
    from entmtp.calibration.latency import forward_ms

    config, blocks = from_plain(LatencyConfig, params["latency"]), from_plain(ConfAdaptConfig, params["confadapt"])
    targets = {"own": _open_multi_token(inp, params)[0]}
    if "draft" in blocks.lossless:
        targets["original"], _ = open_block(params)
    made = {}
    for name, target in targets.items():
        ms = forward_ms(target, target.new_cache(max(config.contexts) + max(config.sizes)), config)
        made[name] = {"tokens": config.sizes, "ms": ms.mean(axis=0).tolist()}
    write_json(out.latency, made)


def confadapt(inp, out, params) -> None:
    """Timed decoding of one task's test prompts: every rule of the multi-token model, and verified blocks."""
    from entmtp.decoding.confadapt import BlockDecoder
    from entmtp.distill.published import check_same_vocabulary
    from entmtp.evaluation import lossless_blocks as verified
    from entmtp.evaluation.confadapt import block_arms, decode_all, rules_of
    from entmtp.session import capacity_for
    from entmtp.tasks import read_prompts

    config, decoding = from_plain(ConfAdaptConfig, params["confadapt"]), from_plain(DecodingConfig, params["decoding"])
    tests, latency = read_prompts(inp.prompts, "test"), read_json(inp.latency)
    own, mask_id = _open_multi_token(inp, params)
    rules = rules_of(config.k_max, config.thresholds, config.static)
    most = BlockDecoder.rows(max(rule.k_max for rule in rules.values()))
    capacity = capacity_for(tests, decoding.max_new_tokens, max(most, config.max_nodes + 1))
    # a multi-token model's embedding may be longer: what the original cannot read is not said
    limit = read_json(Path(inp.target).with_name("config.json"))["vocab_size"]
    arms, original = block_arms(BlockDecoder(own, mask_id, capacity, limit), rules), None
    if "self" in config.lossless:
        arms[verified.SELF] = verified.self_arm(own, mask_id, capacity, limit, latency, config)
    if "draft" in config.lossless:
        original, _ = open_block(params)
        check_same_vocabulary(own, original)
        arms |= verified.draft_arms(own, mask_id, original, capacity, latency, config)
    models = [own.fingerprint, mask_id, sorted(own.stop_ids), original.fingerprint if original else None]
    files = [sha256_file(path) for path in (inp.prompts, inp.latency)]
    identity = sha256_json([models, files, params["confadapt"], params["decoding"], params["dtype"]])
    journal = Journal(Path(out.rows).with_suffix(".journal.jsonl"), identity)
    rows = decode_all(arms, tests, decoding.max_new_tokens, journal)
    write_parquet(out.rows, rows)
    targets = {verified.SELF: own, verified.DRAFT: original}
    margin = from_plain(BenchConfig, params["bench"]).tie_margin[params["dtype"]]
    result = {"task": params["task"], "dtype": params["dtype"],
              "policies": verified.verdicts_of(rows, tests, targets, margin)}  # fmt: skip
    write_verdicts(out.check, result, "differ from plain decoding of the verifying model by more than a numerical tie")
    journal.remove()


def confadapt_judged(inp, out, params) -> None:
    """Accuracy and speed of every method on one task, and of the run's lossless policies beside them."""
    from entmtp.evaluation.confadapt import entmtp_rows, judged
    from entmtp.evaluation.perplexity import policy_nll
    from entmtp.tasks import read_prompts

    tests, rows = read_prompts(inp.prompts, "test"), read_parquet(inp.rows).to_dict("records")
    scoring, tests = _with_answers(tests, params)
    base, _ = open_block({**params, "dtype": "float32"})  # the original model, always judged in float32
    cache = base.new_cache(max(len(p["token_ids"]) for p in tests) + max(len(row["tokens"]) for row in rows))
    nll = policy_nll(base, cache, rows, tests)
    verdicts = {name: entry["verdict"] for name, entry in read_json(inp.check)["policies"].items()}
    made = judged(rows, tests, base.tokenizer, scoring, nll, params["bootstrap"], params["seed"], verdicts)
    summary = [row for row in read_json(inp.summary)["rows"] if row["task"] == params["task"]]
    made += entmtp_rows(read_parquet(inp.bench), summary, tests, base.tokenizer, scoring)
    write_json(out.part, [{"task": params["task"], **row} for row in made])


def _with_answers(tests: list[dict], params) -> tuple[str | None, list[dict]]:
    """How the task is judged, and its prompts with what that compares with. None: not at all, since the answers are
    programs and `confadapt.execute_code` is off."""
    scoring = params["scoring"]
    if scoring == "code":
        if not params["code"]["execute"]:
            print(f"task {params['task']}: no accuracy, since confadapt.execute_code=false", flush=True)
            return None, tests
        from entmtp.evaluation.code import load_problems
        from entmtp.evaluation.sandbox import check_sandbox

        check_sandbox()
        problems = load_problems(from_plain(TaskConfig, params["code"]["task"]), params["resources"])
        return scoring, [{**row, "answer": problems[row["id"]]} for row in tests]
    if any("answer" not in row for row in tests) or not scoring:
        raise EntmtpError(f"task {params['task']}: ConfAdapt is judged on tasks with answers and task.scoring")
    return scoring, tests


def confadapt_report(inp, out, params) -> None:
    """confadapt.json, its table, and the frontier of accuracy against acceleration."""
    from entmtp.evaluation.records import make_confadapt

    rows = [row for path in inp.parts for row in read_json(path)]
    history = getattr(inp, "history", None)  # a published model was not trained here
    record = {
        "rows": rows,
        "model": {key: params["mtp"][key] for key in ("name", "source", "repo", "revision")},
        "training": read_json(history) if history else None,
        "provenance": provenance(params["block"]),
    }
    check_schema(record, "confadapt")
    write_json(out.record, record)
    make_confadapt(record, from_plain(PlotConfig, params["plot"]), Path(out.table).parent)
