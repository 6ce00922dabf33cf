"""The last step of head training: features -> training -> native format, card and README."""

from dataclasses import asdict
from pathlib import Path

from entmtp.config import CorpusConfig, HeadsConfig
from entmtp.heads.corpus import known_prompts, training_prompts
from entmtp.heads.features import Features
from entmtp.heads.model import save_heads
from entmtp.heads.train import HeadsTrainer
from entmtp.io import read_jsonl, sha256_file, sha256_json, write_json, write_text
from entmtp.provenance import provenance


def train_recipe(
    target, config: HeadsConfig, corpus: CorpusConfig, files: dict[str, list[str]], folder: Path, command: str
) -> None:
    """Train `config` for `target` into `folder` (native format, card.json, README.md). Interrupted runs resume.

    `files`: the corpus' `texts` and `features` shards, and the pipeline's `prompts` of all tasks, none of which is
    trained on. `command` repeats the run.
    """
    trainer = HeadsTrainer(target, Features.open(files["features"]), config)
    history = trainer.run(folder / "checkpoint.pt")
    save_heads(trainer.heads, folder)
    best = max(history, key=lambda row: row["accept_length"])
    card = {
        "heads": asdict(trainer.heads.config),
        "target": target.fingerprint,
        "command": command,
        "text": text_card(files["texts"], corpus, files["prompts"], trainer.features),
        "training": {"steps": trainer.step, "seconds": round(trainer.seconds, 1), "best": best, "curve": history},
        "config": {"heads": asdict(config), "corpus": asdict(corpus)},
        "weights_sha256": sha256_file(folder / "model.safetensors"),
        "provenance": provenance({"device": target.device, "dtype": target.dtype_name, "heads": asdict(config)}),
    }
    write_json(folder / "card.json", card)
    write_text(folder / "README.md", _readme(card))
    (folder / "checkpoint.pt").unlink(missing_ok=True)


def text_card(shards: list[str], corpus: CorpusConfig, prompt_files: list[str], features: Features) -> dict:
    """What the heads learned from: counts, de-duplication, and a hash over keys and tokens."""
    texts = sorted((row for shard in shards for row in read_jsonl(shard)), key=lambda row: row["key"])
    tasks: dict[str, int] = {}
    for row in texts:
        tasks[row["task"]] = tasks.get(row["task"], 0) + len(row["tokens"])
    _, counts = training_prompts(corpus, known_prompts(corpus, prompt_files))
    return {
        "sha256": sha256_json([[row["key"], row["tokens"]] for row in texts]),
        "texts": len(texts),
        "texts_held_out": sum(text.held_out for text in features.texts),
        "tokens": sum(tasks.values()),
        "tokens_by_task": tasks,
        "sampled_texts": sum(row["sampled"] for row in texts),
        "prompts": counts,
    }


def _readme(card: dict) -> str:
    heads, text, best, corpus = card["heads"], card["text"], card["training"]["best"], card["config"]["corpus"]
    sources = "\n".join(
        f"- `{source['file']}`, column `{source['column']}`, {source['samples']} text(s) a prompt"
        + (f", the half of rows that a hash of `{source['half']}` picks" if source["half"] else "")
        for source in corpus["prompts"]
    )
    rates = "\n".join(
        f"| {d} | {top1:.3f} | {top5:.3f} |"
        for d, (top1, top5) in enumerate(zip(best["top1"], best["top5"], strict=True), 1)
    )
    accepted = ", ".join(f"{task} {value:.2f}" for task, value in best["num_accepted"].items())
    prefix = ", behind one prefix attention layer (Hydra++)" if heads["prefix"] else ""
    return f"""# {heads["arch"].capitalize()} heads for {card["target"]}

{heads["depth"]} heads, {heads["blocks"]} residual block(s) each{prefix}, draft vocabulary of {heads["draft_vocab"]}
tokens, float16 safetensors. Trained on {text["tokens"]:,} tokens of the target's own text
({text["texts"]:,} texts, {text["sampled_texts"]:,} of them sampled at T = {corpus["temperature"]}, the rest greedy),
best after epoch {best["epoch"]}, {card["training"]["steps"]:,} steps in {card["training"]["seconds"]:.0f} s on
{card["provenance"]["device"]}.

    {card["command"]}

Prompts of the text (kept out: {text["prompts"]["excluded_exact"]} exact and {text["prompts"]["excluded_near"]} near
duplicates of calibration, test and measuring prompts):

{sources}

Held out: {best["positions"]:,} positions of texts whose prompts were not trained on
(a token outside the draft vocabulary counts as a miss).

| head | top-1 | top-5 |
| --- | --- | --- |
{rates}

num_accepted of the fixed 16-node tree, replayed on held-out texts: {accepted}.

`card.json` holds the configuration, the text's hash, the curve and the provenance. Licence: Apache-2.0.
"""
