"""The pipeline's check that replay and live runs agree, step for step, on the test split."""

from pathlib import Path

from entmtp.calibration.growth import load_growth, save_growth
from entmtp.calibration.growth_traces import growth_of
from entmtp.calibration.replay import Trace
from entmtp.calibration.texts import trace_rows
from entmtp.config import BenchConfig, DecodingConfig, from_plain
from entmtp.evaluation.checks import TIE_GAP, replay_verdict
from entmtp.io import read_parquet, write_parquet
from entmtp.session import load_policy
from entmtp.tasks import read_prompts


def check_task(inp, out, params, open_target) -> dict:
    """Trace the plain texts of the test split for each kind of heads, replay every policy, compare with the bench.

    Writes the test traces too (out.traces, one a kind of heads). Only float32 with exact acceptance is held to
    equality; elsewhere the verdict is n/a.
    """
    decoding, tests = from_plain(DecodingConfig, params["decoding"]), read_prompts(inp.prompts, "test")
    rows = read_parquet(inp.bench).to_dict("records")
    reference = {row["prompt_id"]: [int(token) for token in row["tokens"]] for row in rows if row["kind"] == "ar"}
    exact = params["dtype"] == "float32" and decoding.mode != "typical"
    tie = from_plain(BenchConfig, params["bench"]).tie_margin[params["dtype"]]
    longest = max(len(p["token_ids"]) for p in tests) + decoding.max_new_tokens
    policies = {name: {"verdict": "n/a", "steps": 0} for name in params["arms"]}
    for kind, traces_path in zip(params["kinds"], out.traces, strict=True):
        block = {**params, "heads": params["kinds"][kind]}
        target, decoder = open_target(block, params["heads_folders"][kind], longest)
        made = trace_rows(target, decoder, tests, reference, decoding, tie)
        write_parquet(traces_path, made)
        trace = Trace.from_frame(read_parquet(traces_path))
        if kind in params["growing"]:
            path = out.growth[list(params["growing"]).index(kind)]
            save_growth(growth_of(target, decoder, tests, reference, **params["growth"]), path)
            trace.growth = load_growth(path)
        for name, heads in params["arms"].items():
            if heads == kind and exact:
                policy, _, _ = load_policy(params["run"], params["task"], heads, name)
                own = [row for row in rows if row["policy"] == name]
                policies[name] = _verdict(trace, policy, own, reference)
                print(f"replay {name}: {policies[name]['verdict']}, {policies[name]['steps']} steps", flush=True)
    return {"task": params["task"], "dtype": params["dtype"], "policies": policies, "run": Path(params["run"]).name}


def _verdict(trace: Trace, policy, rows: list[dict], reference: dict[str, list[int]]) -> dict:
    """Of the prompts whose text is plain decoding's. Where a numerical tie has made it another (check_lossless proves
    it one), replay knows nothing of that text: `other_texts` counts them, and the verdict is a tie at best."""
    same = [row for row in rows if [int(token) for token in row["tokens"]] == reference[row["prompt_id"]]]
    found = replay_verdict(trace, policy, same, TIE_GAP)
    others = len(rows) - len(same)
    if others and found["verdict"] == "equal":
        found["verdict"] = "tie"
    return {**found, "other_texts": others}
