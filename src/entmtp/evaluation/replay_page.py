"""`replay_generation.html`: one generation step by step, from its record (`generation`), in one self-contained page."""

from pathlib import Path
from typing import Any

from entmtp.evaluation.page import json_block, write_page
from entmtp.evaluation.tables import MISSING, number

# name in workflow/report → heading
PARTS = {
    "replay_text": "The text, coloured by step",
    "replay_tree": "The tree of this step",
    "replay_signals": "Along the generation",
    "replay_steps": "All steps",
}
MOST_SHADES = 4  # accepted counts that have a colour of their own; more share the last

_MARKS = str.maketrans({" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"})


def visible(text: str) -> str:
    """A token with its white space to be seen, control characters as escapes."""
    marked = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text.translate(_MARKS))
    return marked or "∅"


def signal_depth(record: dict[str, Any]) -> int | None:
    """Depth of the path value that is shown: the policy's own, else the deepest of the trace; None without a trace."""
    traced = [len(step["path_values"]) - 1 for step in record["steps"] if step["path_values"]]
    return (record["depth"] if record["depth"] is not None else traced[0]) if traced else None


def page_steps(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What the page says of every step; all texts are made here, the script only places them.

    `kept`: nodes whose tokens are in the text, root first; `cut`: accepted ones past the text's end; `next`: the
    target's own token after the last kept one, which is the next step's root (None where the text ends).
    """
    depth, pieces, total = signal_depth(record), record["pieces"], len(record["steps"])
    made = []
    for index, step in enumerate(record["steps"]):
        end = step["position"] + step["committed"]
        path_value = step["path_values"][depth] if step["path_values"] else None
        shown = {
            "number": index + 1,
            "nodes": len(step["parents"]) - 1,
            "accepted": step["committed"] - 1,
            "parents": step["parents"],
            "ids": step["tokens"],
            "labels": [visible(label) for label in step["labels"]],
            "kept": step["accepted"][: step["committed"]],
            "cut": step["accepted"][step["committed"] :],
            "pieces": pieces[step["position"] : end],
            "next": _next_root(record, index, end),
            "path_value": path_value,
            "entropy": step["entropy"],
            "ms": step["ms"],
        }
        made.append(shown | {"sentence": _sentence(shown, total), "facts": _facts(shown, depth, record)})
    return made


def _next_root(record: dict[str, Any], index: int, end: int) -> str | None:
    if index + 1 < len(record["steps"]):
        return visible(record["steps"][index + 1]["labels"][0])
    if end < len(record["pieces"]):  # a last root that needed no step
        return visible(record["stop"] or record["pieces"][end])
    return None


def _sentence(step: dict[str, Any], total: int) -> str:
    nodes, accepted, cut = step["nodes"], step["accepted"], len(step["cut"])
    said = [f"Step {step['number']} of {total}, root “{step['labels'][0]}”."]
    if not nodes:
        said.append("Nothing is drafted: plain decoding.")
    else:
        past = f", {cut} accepted past the text's end" if cut else ""
        said.append(
            f"{nodes} drafted {'token' if nodes == 1 else 'tokens'}: {accepted} accepted, "
            f"{nodes - accepted - cut} rejected{past}."
        )
    said.append(f"Next root: “{step['next']}”." if step["next"] is not None else "The text ends here.")
    return " ".join(said)


def _facts(step: dict[str, Any], depth: int | None, record: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) in the order of reading."""
    against = ", ".join(f"{name} = {value:.3f}" for name, value in record["thresholds"].items())
    path_value = number(step["path_value"], 3) + (f" ({against})" if against and len(against) < 40 else "")
    return [
        ("tree nodes", str(step["nodes"])),
        ("num_accepted", str(step["accepted"])),
        *([] if depth is None else [(f"path value, depth {depth}", path_value)]),
        ("entropy (nats)", number(step["entropy"], 3)),
        ("ms, timed", number(step["ms"], 1)),
    ]


def verdict(record: dict[str, Any]) -> str:
    """How the recorded run stands to the timed one."""
    steps, equal = len(record["steps"]), record["equal_steps"]
    if record["equal"]:
        return f"Text and all {steps} steps equal those of the timed run ({record['tokens_per_s']:.1f} tokens/s)."
    return (
        f"Recorded in another run than the timed one: the first {equal} of {steps} steps are equal, then the two part, "
        "as a numerical tie lets them. Milliseconds are given as far as the steps are the same."
    )


def write_replay_page(path: str | Path, record: dict[str, Any], captions: dict[str, str], command: str = "") -> None:
    """Write the page; its link back expects report.html beside it. `captions` by name of PARTS; `command` makes the
    page of this very generation."""
    steps, depth = page_steps(record), signal_depth(record)
    last = record["steps"][-1] if record["steps"] else {"position": 0, "committed": 0}
    write_page(
        path,
        "replay.html.j2",
        record=record,
        command=command,
        steps=steps,
        tail="".join(record["pieces"][last["position"] + last["committed"] :]),
        stop=record["stop"],
        verdict=verdict(record),
        depth=depth,
        shades=MOST_SHADES,
        data=json_block({"steps": steps, "depth": depth, "thresholds": record["thresholds"]}),
        titles=PARTS,
        captions=captions,
        number=number,
        visible=visible,
        missing=MISSING,
    )
