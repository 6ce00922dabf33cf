"""The `entmtp` command: `entmtp --version`, and every `python -m entmtp.…` under a short name.

The list itself needs nothing but the standard library.
"""

import argparse
import runpy
import sys

from entmtp import __version__

# name → (module, what it does); those of `make` have the same names there
COMMANDS = {
    "generate": ("generate", "text as it is committed, by a fitted policy or plain decoding"),
    "blocks": ("blocks", "text of a multi-token model, as its blocks are committed (ConfAdapt)"),
    "sweep": ("sweep", "thresholds and policies over a finished run, as a Hydra multirun"),
    "export": ("export", "a finished run's rows as Spec-Bench answer files"),
    "lm-eval": ("lm_eval", "lm-evaluation-harness on draft trees or ConfAdapt"),
    "bench-engine": ("engine_bench", "how far the forwards are from the machine's limits"),
    "bench-peers": ("peers.bench", "our decoding beside transformers' on a finished run's prompts"),
    "bench-long": ("long_run", "memory and speed over many texts in one process"),
    "bench-replay": ("replay_bench", "how fast exact replay is on a finished run's traces"),
    "tables": ("from_logs", "every table and figure again, from a finished run's W&B runs alone"),
    "verify-reproduction": ("reproduction", "token-level results of a finished run against committed hashes"),
    "archive": ("archive", "a finished run as one folder with a manifest, and its check"),
}


def parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    made = argparse.ArgumentParser(
        prog="entmtp",
        description="Draft trees for multi-token prediction: the tokens of plain decoding, in fewer steps.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""\
commands (`entmtp COMMAND --help`; each is also `python -m entmtp.<module>`):
{listed}

examples:
  entmtp generate "Write a haiku about trees." policy=ar max_new_tokens=40
  python -m entmtp.generate --help

A finished run comes from `snakemake --cores all` (`make reproduce`) in a checkout of the repository. In a program:
  from entmtp import load, generate""",
    )
    made.add_argument("--version", action="version", version=f"entmtp {__version__}")
    made.add_argument("command", nargs="?", choices=list(COMMANDS), metavar="COMMAND", help="see below")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run a command as `python -m` would; without one, say what there is."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        sys.argv = [f"entmtp {arguments[0]}", *arguments[1:]]
        runpy.run_module(f"entmtp.{COMMANDS[arguments[0]][0]}", run_name="__main__", alter_sys=True)
        return 0
    parser().parse_args(arguments)
    parser().print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
