"""Stages on the test split: timed runs, and the checks that their result stands on."""

from pathlib import Path

from entmtp.config import BenchConfig, DecodingConfig, HeadsConfig, from_plain
from entmtp.io import journal_of, read_parquet, sha256_file, sha256_json, write_json, write_parquet
from entmtp.provenance import decoding_code
from entmtp.stages.common import open_block, write_verdicts


def bench(inp, out, params) -> None:
    import torch

    from entmtp.evaluation.bench import bench_task
    from entmtp.heads.self_test import check_heads
    from entmtp.session import capacity_for, load_policy, open_decoder
    from entmtp.tasks import read_prompts

    config, decoding = from_plain(BenchConfig, params["bench"]), from_plain(DecodingConfig, params["decoding"])
    tests = read_prompts(inp.prompts, "test")
    loaded = {name: load_policy(params["run"], params["task"], heads, name) for name, heads in params["arms"].items()}
    policies = {name: entry[0] for name, entry in loaded.items()}
    capacity = capacity_for(tests, decoding.max_new_tokens, max(policy.max_nodes for policy in policies.values()))
    base, plain = open_block(params, None, capacity)
    decoders = {None: plain}
    for kind, block in params["kinds"].items():
        folder, heads = Path(params["heads_folders"][kind]), from_plain(HeadsConfig, block)
        decoders[kind] = open_decoder(base, heads, folder, capacity)
        check_heads(base, decoders[kind].drafter, heads, folder)
    journal = journal_of(out.bench)
    identity = bench_identity(inp, params, torch.get_num_threads())
    rows = bench_task(params["task"], [entry[1] for entry in loaded.values()], decoders, policies, tests, decoding,
                      config, base.dtype_name, journal, identity)  # fmt: skip
    # the journal stays until `check_lossless` has read the bench: a run that is killed before Snakemake has noted this
    # job's end deletes the output, and would time everything again
    write_parquet(out.bench, rows)


def bench_identity(files, params, threads: int) -> str:
    """Of what rows are timed under: an interrupted bench goes on under the very same only."""
    said = [params[key] for key in ("decoding", "dtype", "device", "kinds", "arms")]
    return sha256_json([[sha256_file(path) for path in files], said, threads, decoding_code()])


def check_lossless(inp, out, params) -> None:
    from entmtp.evaluation.checks import lossless_verdicts
    from entmtp.tasks import read_prompts

    decoding, tests = from_plain(DecodingConfig, params["decoding"]), read_prompts(inp.prompts, "test")
    base, _ = open_block(params)
    cache = base.new_cache(max(len(p["token_ids"]) for p in tests) + decoding.max_new_tokens)
    margin = from_plain(BenchConfig, params["bench"]).tie_margin[params["dtype"]]
    rows = read_parquet(inp.bench).to_dict("records")
    policies = lossless_verdicts(base, cache, rows, tests, decoding, margin)
    result = {"task": params["task"], "dtype": params["dtype"], "policies": policies}
    write_verdicts(out.check, result, "differ from plain decoding by more than a numerical tie")
    journal_of(inp.bench).unlink(missing_ok=True)


def check_replay(inp, out, params) -> None:
    from entmtp.evaluation.replay_check import check_task

    write_verdicts(out.check, check_task(inp, out, params, open_block), "took live steps that differ from replay")


def perplexity(inp, out, params) -> None:
    from entmtp.evaluation.perplexity import policy_nll
    from entmtp.tasks import read_prompts

    tests = read_prompts(inp.prompts, "test")
    rows = read_parquet(inp.bench).to_dict("records")
    base, _ = open_block({**params, "dtype": "float32"})  # always judged in float32
    cache = base.new_cache(max(len(p["token_ids"]) for p in tests) + max(len(row["tokens"]) for row in rows))
    write_json(out.perplexity, {"task": params["task"], "policies": policy_nll(base, cache, rows, tests)})


def record_generation(inp, out, params) -> None:
    """One generation of the bench, decoded once more and untimed, with what every step drafted."""
    import pandas as pd

    from entmtp.config import ReplayedConfig
    from entmtp.evaluation.figure_data import read_bench, read_thresholds
    from entmtp.evaluation.generation import RecordingDecoder, pick, record_generation
    from entmtp.evaluation.schema import check_schema
    from entmtp.session import capacity_for, load_policy
    from entmtp.tasks import read_prompts

    run, decoding = Path(params["run"]), from_plain(DecodingConfig, params["decoding"])
    row = pick(read_bench(run, list(params["tasks"])), from_plain(ReplayedConfig, params["replayed"]))
    task, kind = row["task"], None if pd.isna(row["heads"]) else row["heads"]
    tests = read_prompts(run / "prompts" / f"{task}.jsonl", "test")
    prompt = next(prompt for prompt in tests if prompt["id"] == row["prompt_id"])
    policy, _, _ = load_policy(run, task, kind, row["policy"])
    capacity = capacity_for([prompt], decoding.max_new_tokens, policy.max_nodes)
    folder = params["heads_folders"][kind] if kind else None
    target, decoder = open_block({**params, "heads": params["kinds"].get(kind)}, folder, capacity)
    decoder = RecordingDecoder(target, decoder.drafter, capacity)
    trace = read_parquet(run / "traces" / kind / f"{task}.test.parquet") if kind else None
    thresholds = read_thresholds(run, row)
    record = record_generation(decoder, policy, row.to_dict(), prompt, decoding, trace, thresholds)
    record["experiment"] = run.name
    check_schema(record, "generation")
    write_json(out.generation, record)
    print(
        f"{row['policy']} on {row['prompt_id']}: {len(record['steps'])} steps, "
        f"{record['equal_steps']} of them equal to the timed ones",
        flush=True,
    )
