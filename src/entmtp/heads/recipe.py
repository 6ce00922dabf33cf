"""The whole of head training: text by the target, features, training, native format and a card."""

import time
from dataclasses import asdict
from pathlib import Path

from entmtp.config import HeadsConfig
from entmtp.errors import EntmtpError
from entmtp.heads.corpus import text_hash, write_texts
from entmtp.heads.features import is_held_out, load_or_compute
from entmtp.heads.model import save_heads
from entmtp.heads.train import HeadsTrainer
from entmtp.io import read_jsonl, sha256_file, sha256_json, write_json, write_text
from entmtp.provenance import provenance


def excluded_prompts(prompt_files: list[str]) -> set[str]:
    """Hashes of every calibration and test prompt: of whole turns, and of their longest paragraph within a template."""
    excluded = set()
    for path in prompt_files:
        for row in read_jsonl(path):
            for message in row["messages"]:
                excluded.add(text_hash(message["content"]))
                excluded.add(text_hash(max(message["content"].split("\n\n"), key=len)))
    return excluded


def train_recipe(target, config: HeadsConfig, prompt_files: list[str], folder: Path) -> None:
    """Train `config` for `target` into `folder` (native format, card.json, README.md). Interrupted runs resume.

    `prompt_files` are the pipeline's prompts of all tasks: none of them is trained on.
    """
    start = time.monotonic()
    if not config.train.prompts:
        raise EntmtpError("heads.train.prompts is empty: name JSONL files of training prompts")
    shared = folder.parent / "text"  # all kinds of heads learn from the same text
    journal, counts = write_texts(target, config.train, excluded_prompts(prompt_files), shared / "texts.jsonl")
    text_seconds = time.monotonic() - start
    texts = sha256_json(sorted(([row["key"], row["tokens"]] for row in journal.rows), key=lambda item: item[0]))
    features = load_or_compute(target, journal.rows, config.train, shared / "features.safetensors")
    trainer = HeadsTrainer(target, features, config)
    history = trainer.run(folder / "checkpoint.pt")
    save_heads(trainer.heads, folder)
    held = sum(is_held_out(row["key"], config.train.held_out) for row in journal.rows)
    card = {
        "heads": asdict(trainer.heads.config),
        "target": target.fingerprint,
        "text": {
            "sha256": texts,
            "texts": len(journal.rows),
            "texts_held_out": held,
            "tokens": sum(len(row["tokens"]) for row in journal.rows),
            "sampled_texts": sum(row["sampled"] for row in journal.rows),
            "prompts": counts,
            "seconds_this_run": round(text_seconds, 1),
        },
        "training": {"steps": trainer.step, "seconds": round(trainer.seconds, 1), "curve": history},
        "config": asdict(config),
        "weights_sha256": sha256_file(folder / "model.safetensors"),
        "provenance": provenance({"device": target.device, "dtype": target.dtype_name, "heads": asdict(config)}),
    }
    write_json(folder / "card.json", card)
    write_text(folder / "README.md", _readme(card))
    (folder / "checkpoint.pt").unlink(missing_ok=True)


def _readme(card: dict) -> str:
    heads, text, last = card["heads"], card["text"], card["training"]["curve"][-1]
    sources = "\n".join(
        f"- `{source['file']}`, column `{source['column']}`, {source['samples']} text(s) a prompt"
        + (f", the half of rows that a hash of `{source['half']}` picks" if source["half"] else "")
        for source in card["config"]["train"]["prompts"]
    )
    rates = "\n".join(
        f"| {d} | {top1:.3f} | {top5:.3f} |"
        for d, (top1, top5) in enumerate(zip(last["top1"], last["top5"], strict=True), 1)
    )
    return f"""# {heads["arch"].capitalize()} heads for {card["target"]}

{heads["depth"]} heads, {heads["blocks"]} residual block(s) each, draft vocabulary of {heads["draft_vocab"]} tokens,
float16 safetensors. Trained by `train_heads` on {text["tokens"]:,} tokens of the target's own text
({text["texts"]:,} texts, {text["sampled_texts"]:,} of them sampled at T = {card["config"]["train"]["temperature"]},
the rest greedy), {card["training"]["steps"]:,} steps, {card["training"]["seconds"]:.0f} s on
{card["provenance"]["cpu"]}.

Prompts of the text (calibration and test prompts excluded: {text["prompts"]["excluded"]} dropped):

{sources}

Held out: {last["positions"]:,} positions of texts whose prompts were not trained on
(a token outside the draft vocabulary counts as a miss).

| head | top-1 | top-5 |
| --- | --- | --- |
{rates}

`card.json` holds the configuration, the text's hash, the curve and the provenance. Licence: Apache-2.0.
"""
