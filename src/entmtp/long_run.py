"""`python -m entmtp.long_run`: many texts one after another in one process: does memory grow, does it slow down?

Decodes a hundred of the task's prompts in turn, `texts=100` times at most 128 tokens, with the shipped heads and a
fixed tree of 16 nodes; with more texts than prompts these repeat (`task.calib` and `task.test` say how many there are).
Prints tokens/s and the process's memory after every tenth of the texts and writes long_run.json into `results`. Other
arguments are Hydra overrides (`task=…`, `dtype=…`).
"""

from pathlib import Path

import torch

from entmtp.command import run_command
from entmtp.config import DecodingConfig, compose
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.evaluation.tables import markdown_table
from entmtp.io import write_json
from entmtp.policy.schedulers import Policy
from entmtp.tree.defaults import DEFAULT_TREES

TREE = "fixed_16"
LONG = ["decoding.max_new_tokens=128", "task.calib=60", "task.test=40"]  # whatever the experiment's sizes are


def _status_mb(field: str) -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(f"{field}:")).split()[1]) / 1024


def resident_mb() -> float:
    """Memory of this process that is in RAM now."""
    return _status_mb("VmRSS")


def peak_mb() -> float:
    """The most that it has been. Not by getrusage, whose peak starts from that of the process that started this one."""
    return _status_mb("VmHWM")


def run(decoder: Decoder, prompts: list[list[int]], texts: int, decoding: DecodingConfig) -> list[dict]:
    """A row per tenth of the texts: {texts, tokens, tokens_per_s, resident_mb, peak_mb}, counted in that tenth."""
    policy, rows, every = Policy(TREE, [DEFAULT_TREES[TREE]]), [], max(1, texts // 10)
    decoder.generate(prompts[0], policy, decoding)  # warm-up
    tokens, seconds = 0, 0.0
    for number in range(1, texts + 1):
        made = decoder.generate(prompts[number % len(prompts)], policy, decoding)
        tokens, seconds = tokens + len(made.tokens), seconds + made.prefill_seconds + made.decode_seconds
        if number % every == 0:
            rows.append({"texts": number, "tokens": tokens, "tokens_per_s": tokens / seconds,
                         "resident_mb": resident_mb(), "peak_mb": peak_mb()})  # fmt: skip
            print(f"long run: {number} texts, {rows[-1]['tokens_per_s']:.1f} tokens/s, "
                  f"{rows[-1]['resident_mb']:.0f} MB", flush=True)  # fmt: skip
            tokens, seconds = 0, 0.0
    return rows


def main(arguments: list[str]) -> None:
    from entmtp.layout import heads_folder, run_folder
    from entmtp.provenance import provenance
    from entmtp.session import capacity_for, open_decoder, open_target
    from entmtp.tasks import build_prompts

    texts = 100
    for argument in [item for item in arguments if item.startswith("texts=")]:
        value = argument.partition("=")[2]
        if not value.isdecimal() or int(value) < 1:
            raise EntmtpError(f"{argument}: a number of texts of at least 1 is needed")
        texts = int(value)
    config = compose([*LONG, *(item for item in arguments if not item.startswith("texts="))])
    if config.threads:
        torch.set_num_threads(config.threads)
    target = open_target(config.target, config.resources, config.dtype, config.device)
    prompts = build_prompts(config.task, target.tokenizer, config.resources)
    folder = heads_folder(config.heads, config.target.name, config.resources, run_folder(config))
    capacity = capacity_for(prompts, config.decoding.max_new_tokens, DEFAULT_TREES[TREE].num_nodes)
    decoder = open_decoder(target, config.heads, folder, capacity)
    rows = run(decoder, [row["token_ids"] for row in prompts], texts, config.decoding)
    about = {"target": config.target.name, "device": config.device, "dtype": config.dtype}
    write_json(Path(config.results) / "long_run.json", {"rows": rows, "provenance": provenance(about)})
    shown = [[f"{row[key]:.1f}" if isinstance(row[key], float) else str(row[key]) for key in row] for row in rows]
    print(markdown_table(list(rows[0]), shown, names=0))


if __name__ == "__main__":
    run_command(main, __doc__)
