"""Stages of the second method: self-distillation, block decoding, what it gains and what it costs."""

from dataclasses import replace
from pathlib import Path

from entmtp.config import (
    BenchConfig,
    ConfAdaptConfig,
    DecodingConfig,
    DistillConfig,
    LatencyConfig,
    MtpConfig,
    PlotConfig,
    TargetConfig,
    TaskConfig,
    from_plain,
)
from entmtp.errors import EntmtpError
from entmtp.evaluation.schema import check_schema
from entmtp.io import (
    Journal,
    journal_of,
    read_json,
    read_jsonl,
    read_parquet,
    sha256_file,
    sha256_json,
    write_json,
    write_jsonl,
    write_parquet,
)
from entmtp.provenance import decoding_code, provenance
from entmtp.stages.common import open_block, write_verdicts


def distill_prompts(inp, out, params) -> None:
    """Prompts of one task to learn from: another draw than the run's own, without any prompt that the run has."""
    from entmtp.target.load import load_tokenizer
    from entmtp.tasks import build_prompts, read_prompts

    config, target = from_plain(TaskConfig, params["task"]), from_plain(TargetConfig, params["target"])
    config = replace(config, calib=params["size"], test=0, seed=config.seed + 1)
    tokenizer = load_tokenizer(Path(inp.target).parent, target.chat_template)
    known = [row for path in inp.prompts for row in read_prompts(path)]
    try:
        made = build_prompts(config, tokenizer, params["resources"], without=known)
    except EntmtpError as error:
        raise EntmtpError(f"distill.prompts.{config.name}={params['size']}: {error}") from error
    write_jsonl(out.prompts, made)


def distill_texts(inp, out, params) -> None:
    """The target's own greedy answers to them."""
    from entmtp.heads.corpus import write_texts
    from entmtp.heads.text import Sequence, batch_decoder
    from entmtp.tasks import prompts_hash, read_prompts

    (base, _), prompts = open_block(params), read_prompts(inp.prompts)
    new, batch = params["max_new_tokens"], params["batch"]
    identity = sha256_json([base.fingerprint, base.dtype_name, new, prompts_hash(prompts)])
    journal = Journal(Path(out.texts).with_suffix(".journal"), identity)
    done = journal.done(lambda row: row["key"])
    todo = [Sequence(row["id"], row["token_ids"], []) for row in prompts if row["id"] not in done]
    longest = max(len(row["token_ids"]) for row in prompts)
    decoder = batch_decoder(base, min(batch, len(prompts)), longest + new, new)
    write_texts(decoder, todo, journal, len(prompts))
    write_jsonl(out.texts, sorted(journal.rows, key=lambda row: row["key"]))
    journal.remove()


def distill(inp, out, params) -> None:
    """A multi-token model from the target and its own texts."""
    from entmtp.distill.recipe import distil
    from entmtp.target.precision import resolved

    config = from_plain(DistillConfig, params["distill"])
    dtype = resolved(config.dtype, params["device"])
    rows = [row for path in inp.texts for row in read_jsonl(path)]
    folder = Path(out.model).parent
    checkpoint = folder.with_name(f"{folder.name}.checkpoint.pt")
    history = distil(Path(inp.target).parent, folder, checkpoint, rows, config, params["device"])
    made = provenance({"device": params["device"], "dtype": dtype})
    texts = {"texts": len(rows), "tokens": sum(len(row["tokens"]) for row in rows),
             "sha256": sha256_json([sha256_file(path) for path in inp.texts])}  # fmt: skip
    write_json(out.history, {"distill": {**params["distill"], "dtype": dtype}, **texts, "curve": history,
                             "provenance": made})  # fmt: skip
    checkpoint.unlink(missing_ok=True)


def multi_token_model(inp, out, params) -> None:
    """Download a published multi-token model."""
    from entmtp.session import fetched

    fetched(from_plain(MtpConfig, params["mtp"]), params["resources"])


def adapted_model(inp, out, params) -> None:
    """What the run decodes with: the adapter itself where it acts on masks only, else the target with it folded in."""
    from entmtp.distill.adapter import use_adapter

    use_adapter(Path(inp.target).parent, Path(inp.adapter[0]).parent, Path(out.model).parent)


def _open_multi_token(inp, params):
    """The multi-token model of a rule's block, and its mask token."""
    from entmtp.distill.published import load_multi_token

    folder, base = Path(inp.model).parent, Path(inp.target).parent  # wherever it came from
    return load_multi_token(from_plain(MtpConfig, params["mtp"]), folder, params["dtype"], params["device"], base)


def confadapt_latency(inp, out, params) -> None:
    """What forwards cost here, of real tokens and masks: the multi-token model's, and the original's where it verifies
    with a drafter beside it."""
    import torch

    from entmtp.calibration.latency import forward_table

    config, blocks = from_plain(LatencyConfig, params["latency"]), from_plain(ConfAdaptConfig, params["confadapt"])
    own, mask_id = _open_multi_token(inp, params)
    targets = {"own": own}
    if "draft" in blocks.lossless and own.mask_id is None:
        targets["original"], _ = open_block(params)
    made: dict = {"threads": torch.get_num_threads()}
    for name, target in targets.items():
        made[name] = forward_table(target, config, mask_id if target is own else None)
    write_json(out.latency, made)


def confadapt(inp, out, params) -> None:
    """Timed decoding of one task's test prompts: every rule of the multi-token model, and verified blocks."""
    import torch

    from entmtp.decoding.confadapt import BlockDecoder
    from entmtp.distill.published import check_same_vocabulary
    from entmtp.evaluation import lossless_blocks as verified
    from entmtp.evaluation.confadapt import block_arms, decode_all, rules_of
    from entmtp.session import capacity_for
    from entmtp.tasks import read_prompts

    config, decoding = from_plain(ConfAdaptConfig, params["confadapt"]), from_plain(DecodingConfig, params["decoding"])
    tests, latency = read_prompts(inp.prompts, "test"), read_json(inp.latency)
    own, mask_id = _open_multi_token(inp, params)
    rules = rules_of(config)
    most = BlockDecoder.rows(max(rule.k_max for rule in rules.values()))
    capacity = capacity_for(tests, decoding.max_new_tokens, max(most, config.max_nodes + 1))
    # a multi-token model's embedding may be longer: what the original cannot read is not said
    limit = read_json(Path(inp.target).with_name("config.json"))["vocab_size"]
    arms, original = block_arms(BlockDecoder(own, mask_id, capacity, limit), rules), None
    if "self" in config.lossless:
        arms[verified.SELF] = verified.self_arm(own, mask_id, capacity, limit, latency, config)
    if "draft" in config.lossless and own.mask_id is None:  # with masks of its own, the model is the original one
        original, _ = open_block(params)
        check_same_vocabulary(own, original)
        arms |= verified.draft_arms(own, mask_id, original, capacity, latency, config)
    models = [own.fingerprint, mask_id, sorted(own.stop_ids), original.fingerprint if original else None]
    files = [sha256_file(path) for path in (inp.prompts, inp.latency)]
    said = [params[key] for key in ("confadapt", "decoding", "dtype", "device")]
    identity = sha256_json([models, files, said, torch.get_num_threads(), decoding_code()])
    journal = Journal(journal_of(out.rows), identity)
    # the journal stays until the rows are judged, as a bench's does until its check
    write_parquet(out.rows, decode_all(arms, tests, decoding.max_new_tokens, journal))


def confadapt_check(inp, out, params) -> None:
    """Verified blocks against plain decoding of the model that verified them."""
    from entmtp.evaluation import lossless_blocks as verified
    from entmtp.tasks import read_prompts

    own, _ = _open_multi_token(inp, params)
    targets = {verified.SELF: own}
    if "draft" in from_plain(ConfAdaptConfig, params["confadapt"]).lossless and own.mask_id is None:
        targets[verified.DRAFT], _ = open_block(params)
    margin = from_plain(BenchConfig, params["bench"]).tie_margin[params["dtype"]]
    rows, tests = read_parquet(inp.rows).to_dict("records"), read_prompts(inp.prompts, "test")
    result = {"task": params["task"], "dtype": params["dtype"],
              "policies": verified.verdicts_of(rows, tests, targets, margin)}  # fmt: skip
    write_verdicts(out.check, result, "differ from plain decoding of the verifying model by more than a numerical tie")


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
    bench = read_parquet(inp.bench)
    plain = bench[bench["policy"] == "ar"]
    original = {id_: list(tokens) for id_, tokens in zip(plain["prompt_id"], plain["tokens"], strict=True)} or None
    made = judged(rows, tests, base.tokenizer, scoring, nll, params["bootstrap"], params["seed"], verdicts, original)
    summary = [row for row in read_json(inp.summary)["rows"] if row["task"] == params["task"]]
    made += entmtp_rows(bench, summary, tests, base.tokenizer, scoring)
    write_json(out.part, [{"task": params["task"], **row} for row in made])
    journal_of(inp.rows).unlink(missing_ok=True)


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
        # this job computes nothing: the threads that count are those of the timed rules
        "provenance": provenance(params["config"], threads=read_json(inp.latency)["threads"]),
    }
    check_schema(record, "confadapt")
    write_json(out.record, record)
    make_confadapt(record, from_plain(PlotConfig, params["plot"]), Path(out.table).parent)
