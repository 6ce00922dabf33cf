"""`python -m entmtp.export specbench [overrides]`: a run's bench rows as Spec-Bench answer files.

Spec-Bench (Xia et al., 2024, arXiv:2401.07851; github.com/hemingkx/Spec-Bench) reads one JSON object a question, as
its `evaluation/eval.py` writes them: question_id, category, answer_id, model_id, choices and tstamp. A choice holds,
a turn each, `turns` (the text), `decoding_steps`, `new_tokens` and `wall_time` (seconds, prefill included), and
`accept_lengths`: tokens of every target forward, the root among them, as in our own accept length. Its scripts then
compare two of our policies as any others:

    python -m entmtp.export specbench experiment=main
    python evaluation/speed.py --file-path results/main/specbench/spec_bench/entmtp_tau.jsonl \\
        --base-path results/main/specbench/spec_bench/ar.jsonl --tokenizer-path resources/targets/smollm2

What to know when reading them. Questions of several turns are answered in their first turn. `speed.py` averages each
question's tokens/s, where our tables divide totals; and it counts the baseline's tokens anew from its text, less one
for a start token, so for a tokenizer that adds none, and for the stop token that the text does not show, its speedup
is too high by a token or two in every answer.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from entmtp.command import exit_status
from entmtp.errors import EntmtpError
from entmtp.io import read_parquet, sha256_json, write_jsonl


def specbench_answers(
    bench: pd.DataFrame, prompts: list[dict], decode: Callable[[list[int]], str], model: str
) -> dict[str, list[dict]]:
    """{policy: answers in the order of their questions} of one task's bench rows.

    `prompts` are rows of prompts.jsonl: questions without a category get their task's name. `decode` turns token ids
    into text without special tokens. Raises EntmtpError for rows of a prompt that `prompts` do not hold.
    """
    questions = {prompt["id"]: prompt for prompt in prompts}
    answers: dict[str, list[dict]] = {}
    for row in bench.to_dict("records"):
        if row["prompt_id"] not in questions:
            raise EntmtpError(f"bench row of prompt '{row['prompt_id']}', which the task's prompts.jsonl does not hold")
        question = questions[row["prompt_id"]]
        name = f"{model}-{row['policy']}-{row['dtype']}"
        answers.setdefault(row["policy"], []).append(
            {
                "question_id": _question_id(row["prompt_id"]),
                "category": question.get("category", row["task"]),
                "answer_id": sha256_json([name, row["prompt_id"], list(map(int, row["tokens"]))])[:22],
                "model_id": name,
                "choices": [_choice(row, decode)],
                "tstamp": float(row.get("time", 0.0)),
            }
        )
    # numbers before names, each in their own order
    return {policy: sorted(found, key=lambda answer: (isinstance(answer["question_id"], str), answer["question_id"]))
            for policy, found in answers.items()}  # fmt: skip


def _choice(row: dict[str, Any], decode: Callable[[list[int]], str]) -> dict:
    steps = [int(count) + 1 for count in row["step_accepted"]]  # a last root that needed no forward is in no step
    return {
        "index": 0,
        "turns": [decode(list(map(int, row["tokens"]))).strip()],
        "decoding_steps": [len(steps)],
        "new_tokens": [int(row["new_tokens"])],
        "wall_time": [float(row["prefill_s"] + row["decode_s"])],
        "accept_lengths": steps,
    }


def _question_id(prompt_id: str) -> int | str:
    """Spec-Bench numbers its questions; other tasks' prompts keep their names."""
    return int(prompt_id) if prompt_id.isascii() and prompt_id.isdecimal() else prompt_id


def export_specbench(overrides: list[str]) -> list[Path]:
    """Write `<results>/<experiment>/specbench/<task>/<policy>.jsonl` for the tasks of a run that are timed.

    `task=NAME` among the overrides asks for one task. Raises EntmtpError when nothing has been timed.
    """
    from transformers import AutoTokenizer

    from entmtp.config import compose
    from entmtp.layout import run_folder, target_folder
    from entmtp.tasks import read_prompts

    config = compose(overrides)
    run = run_folder(config)
    asked = [item.partition("=")[2] for item in overrides if item.startswith("task=")]
    tasks = [task for task in (asked[-1:] or config.tasks) if (run / "bench" / f"{task}.parquet").is_file()]
    if not tasks:
        raise EntmtpError(
            f"{run / 'bench'}: no timed task among {', '.join(asked[-1:] or config.tasks)}; run `snakemake --cores all "
            f"--config experiment={config.experiment}` first"
        )
    folder = target_folder(config.target, config.resources)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise EntmtpError(f"{folder}: no tokenizer to read the texts with ({str(error).splitlines()[0]})") from error

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    written = []
    for task in tasks:
        bench = read_parquet(run / "bench" / f"{task}.parquet")
        prompts = read_prompts(run / "prompts" / f"{task}.jsonl")
        for policy, answers in specbench_answers(bench, prompts, decode, config.target.name).items():
            written.append(run / "specbench" / task / f"{policy}.jsonl")
            write_jsonl(written[-1], answers)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m entmtp.export",
        description="Write a finished run's bench rows in another project's format.",
        epilog="example: python -m entmtp.export specbench experiment=main task=spec_bench",
    )
    parser.add_argument("format", choices=["specbench"], help="specbench: answer files for Spec-Bench's own scripts")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="experiment=NAME, task=NAME, …")
    arguments = parser.parse_args()
    return exit_status(lambda: print(*export_specbench(arguments.overrides), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
