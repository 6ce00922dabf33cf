"""Stages of the second method: self-distillation, block decoding, what it gains and what it costs."""

from pathlib import Path

from entmtp.config import ConfAdaptConfig, DecodingConfig, DistillConfig, PlotConfig, TaskConfig, from_plain
from entmtp.errors import EntmtpError
from entmtp.evaluation.schema import check_schema
from entmtp.io import Journal, read_json, read_parquet, sha256_file, sha256_json, write_json, write_parquet, write_text
from entmtp.provenance import provenance
from entmtp.stages.common import open_block


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


def confadapt(inp, out, params) -> None:
    """Timed block decoding of one task's test prompts under every rule."""
    from entmtp.decoding.confadapt import BlockDecoder
    from entmtp.evaluation.confadapt import decode_all, rules_of
    from entmtp.session import capacity_for
    from entmtp.tasks import read_prompts

    config, decoding = from_plain(ConfAdaptConfig, params["confadapt"]), from_plain(DecodingConfig, params["decoding"])
    tests, folder = read_prompts(inp.prompts, "test"), str(Path(inp.model).parent)
    target, _ = open_block({**params, "target": {**params["target"], "source": "folder", "path": folder}})
    rules = rules_of(config.k_max, config.thresholds, config.static)
    most = max(rule.k_max for rule in rules.values())
    capacity = capacity_for(tests, decoding.max_new_tokens, BlockDecoder.rows(most))
    decoder = BlockDecoder(target, target.config.mtp_mask_id, capacity)
    identity = sha256_json(
        [[sha256_file(path) for path in inp], params["confadapt"], params["decoding"], params["dtype"]]
    )
    journal = Journal(Path(out.rows).with_suffix(".journal.jsonl"), identity)
    rows = decode_all(decoder, rules, tests, decoding.max_new_tokens, journal)
    write_parquet(out.rows, rows)
    journal.remove()


def confadapt_judged(inp, out, params) -> None:
    """Accuracy and speed of every rule on one task, and of the run's lossless policies beside them."""
    from entmtp.evaluation.confadapt import entmtp_rows, judged
    from entmtp.evaluation.perplexity import policy_nll
    from entmtp.tasks import read_prompts

    tests, rows = read_prompts(inp.prompts, "test"), read_parquet(inp.rows).to_dict("records")
    scoring, tests = _with_answers(tests, params)
    base, _ = open_block({**params, "dtype": "float32"})  # the original model, always judged in float32
    cache = base.new_cache(max(len(p["token_ids"]) for p in tests) + max(len(row["tokens"]) for row in rows))
    nll = policy_nll(base, cache, rows, tests)
    made = judged(rows, tests, base.tokenizer, scoring, nll, params["bootstrap"], params["seed"])
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
    from entmtp.evaluation.confadapt_report import markdown
    from entmtp.evaluation.figures import save_figure
    from entmtp.evaluation.figures_science import accuracy_frontier

    rows = [row for path in inp.parts for row in read_json(path)]
    record = {"rows": rows, "training": read_json(inp.history), "provenance": provenance(params["block"])}
    check_schema(record, "confadapt")
    write_json(out.record, record)
    write_text(out.table, markdown(rows))
    save_figure(accuracy_frontier(rows, from_plain(PlotConfig, params["plot"])), Path(out.figure).with_suffix(""))
