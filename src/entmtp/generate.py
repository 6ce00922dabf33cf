"""`python -m entmtp.generate "prompt" [overrides]`: text as it is committed, by a fitted policy or plain decoding."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from io import TextIOWrapper
from types import ModuleType
from typing import TYPE_CHECKING

from entmtp.config import CONF, Config, choices, compose
from entmtp.errors import EntmtpError

if TYPE_CHECKING:
    from entmtp.language_model import LanguageModel, Result

SHORTHAND = {"max_new_tokens": "decoding.max_new_tokens"}
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m entmtp.generate",
        description="Generate text with draft trees: the very tokens of plain decoding, in fewer steps.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""\
overrides (Hydra's, any key of conf/):
  policy=NAME         who picks the draft tree of each step: {", ".join(choices("policy"))}
                      ar is plain decoding; ar, medusa and hydra need no calibration, the others are fitted ones
  task=NAME           whose bank and thresholds the policy uses; the prompt itself is yours. Take the task that is most
                      like your text: {", ".join(choices("task"))}
  experiment=NAME     the run that calibrated them (results/NAME): {", ".join(choices("experiment"))}
  dtype=NAME          float32 (default of most experiments), bfloat16, float16
  max_new_tokens=N    short for decoding.max_new_tokens
  decoding=NAME       {", ".join(choices("decoding"))}
  target=NAME         {", ".join(choices("target"))}

examples:
  python -m entmtp.generate "Write a haiku about trees." policy=ar max_new_tokens=40
  python -m entmtp.generate "Write a function that reverses a list." policy=entmtp_tau task=humaneval experiment=main
  python -m entmtp.generate "Tell me a story." task=litbench decoding=sample decoding.temperature=0.9 decoding.seed=1
  cat prompt.txt | python -m entmtp.generate - policy=hydra dtype=bfloat16 max_new_tokens=200

The text goes to stdout; the last line on stderr has tokens/s, accept length (tokens per step) and tree shares.""",
    )
    parser.add_argument("prompt", help='the user\'s turn; "-" reads it from stdin')
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="see below")
    parser.add_argument("--no-chat", action="store_true", help="continue the raw prompt, without the chat template")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    return parser.parse_intermixed_args(arguments)


@dataclass
class Stats:
    """What the closing line shows. `seconds` = prefill + decode, without the printing."""

    tokens: int = 0
    seconds: float = 0.0
    accepted: int = 0  # drafted tokens that were committed
    nodes: Counter = field(default_factory=Counter)  # steps by their tree's nodes
    lossless: str = "exact"  # as Result.lossless

    def take(self, result: "Result") -> None:
        self.tokens, self.seconds = len(result.tokens), result.prefill_seconds + result.decode_seconds
        self.accepted = sum(step.accepted for step in result.forwards)
        self.nodes, self.lossless = Counter(step.nodes for step in result.forwards), result.lossless

    def line(self, config: Config) -> str:
        steps = sum(self.nodes.values())
        length = f"{self.accepted / steps + 1:.2f}" if steps else "n/a"
        shares = ", ".join(f"{nodes}: {count / steps:.0%}" for nodes, count in sorted(self.nodes.items()))
        verdict = {"exact": "lossless", "numerical ties": f"lossless up to {config.dtype}'s numerical ties",
                   "lossy": "lossy (typical)"}[self.lossless]  # fmt: skip
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (f"{self.tokens} tokens in {self.seconds:.2f} s | {rate:.1f} tokens/s | accept length {length} | "
                f"trees (nodes: share) {shares or 'none'} | {verdict}")  # fmt: skip


def prepare(arguments: argparse.Namespace) -> tuple[Config, str]:
    """The composed configuration, with the heads that the policy drafts with, and the prompt's text."""
    from entmtp.layout import compose_heads

    _check_prompt(arguments.prompt)
    overrides = [_expand(override) for override in arguments.overrides]
    config = compose(overrides)
    asked = [item.partition("=")[2] for item in overrides if item.startswith("heads=")]
    kind = config.policy.heads
    if kind:
        if asked and asked[-1] != kind:
            raise EntmtpError(
                f"policy '{config.policy.name}' drafts with {kind} heads, not {asked[-1]}: leave heads= out or say "
                f"policy.heads={asked[-1]} too"
            )
        rest = [item for item in overrides if not item.startswith("heads=")]
        config = replace(config, heads=compose_heads(config, rest, kind))
    prompt = _read_input() if arguments.prompt == "-" else arguments.prompt
    if not prompt.strip():
        raise EntmtpError("the prompt is empty")
    return config, prompt


def _read_input() -> str:
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise EntmtpError(f"the prompt on standard input is not valid {error.encoding} ({error.reason})") from error


def _check_prompt(prompt: str) -> None:
    """An override in the prompt's place is a slip, not a prompt."""
    key, equals, _ = prompt.partition("=")
    known = key in SHORTHAND or (CONF / key).is_dir() or key.partition(".")[0] in {item.name for item in fields(Config)}
    if equals and key and " " not in key and known:
        raise EntmtpError(f"the first argument is the prompt, but '{prompt}' is an override: put the prompt before it")


def _expand(override: str) -> str:
    key, equals, value = override.partition("=")
    return f"{SHORTHAND.get(key, key)}{equals}{value}"


def open_policy(config: Config):
    """The policy to run: fixed ones from the configuration alone, fitted ones from the experiment's run folder.

    Thresholds that the configuration gives (policy.tau_on, …) replace the fitted ones.
    """
    from entmtp.layout import run_folder
    from entmtp.policy.fit import build_policy, fit_policy
    from entmtp.session import load_policy

    policy = config.policy
    if policy.kind in ("ar", "static"):
        return build_policy(fit_policy(policy, None, None, None), None)
    _, fitted, bank = load_policy(run_folder(config), config.task.name, policy.heads, policy.name)
    given = {key: getattr(policy, key) for key in ("tau_on", "tau_off", "depth") if getattr(policy, key) is not None}
    if policy.kind != "tau" and any(fitted[key] != value for key, value in given.items()):
        raise EntmtpError(f"policy '{policy.name}' is fitted as a whole: {', '.join(given)} can be set for tau only")
    if given.get("depth", 0) > config.heads.depth:
        raise EntmtpError(f"policy.depth={given['depth']} exceeds the {config.heads.depth} draft heads")
    usual = compose([f"policy={policy.name}"]).policy
    others = [item.name for item in fields(policy) if item.name not in ("heads", "tau_on", "tau_off", "depth")]
    unread = [f"policy.{key}" for key in others if getattr(policy, key) != getattr(usual, key)]
    if unread:
        print(f"note: {', '.join(unread)}: not looked at here. The policy is the run's, as it was fitted: such keys "
              "are for the run (snakemake … overrides=…)", file=sys.stderr)  # fmt: skip
    return build_policy({**fitted, **given}, bank)


def open_model(config: Config) -> "LanguageModel":
    """Target, heads and policy of a configuration."""
    import torch

    from entmtp.heads.drafter import make_drafter
    from entmtp.heads.model import load_kind
    from entmtp.heads.self_test import check_heads
    from entmtp.language_model import LanguageModel
    from entmtp.layout import heads_folder, run_folder
    from entmtp.session import open_target

    policy = open_policy(config)  # before the target: a missing fit is said at once
    if config.threads:
        torch.set_num_threads(config.threads)
    target = open_target(config.target, config.resources, config.dtype, config.device)
    if config.policy.kind == "ar":
        return LanguageModel(target, None, policy)
    folder = heads_folder(config.heads, config.target.name, config.resources, run_folder(config))
    drafter = make_drafter(load_kind(folder, target, config.heads), target, config.heads.width, config.heads.storage)
    check_heads(target, drafter, config.heads, folder)
    return LanguageModel(target, drafter, policy)


def stream(config: Config, prompt: str, chat: bool, stats: Stats, stop: Iterable[str] = ()) -> Iterator[str]:
    """Pieces of text as they are committed; fills `stats` at the end. Batch size 1."""
    lm = open_model(config)
    made = lm.stream_ids(lm.encode(prompt, chat), config.decoding, stop=stop)
    yield from made
    stats.take(made.result)


def run(arguments: argparse.Namespace) -> None:
    config, prompt = prepare(arguments)
    stats = Stats()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without emoji shows something else, and the text goes on
    for piece in stream(config, prompt, not arguments.no_chat, stats, arguments.stop):
        print(piece, end="", flush=True)
    print(flush=True)
    print(f"{config.policy.name}: {stats.line(config)}", file=sys.stderr)


def main() -> int:
    """Exit status 0; 1 with one line on stderr for a mistake of the user's; 130 when interrupted."""
    arguments = parse(sys.argv[1:])
    try:
        run(arguments)
    except EntmtpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone (… | head): nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


class _CallableModule(ModuleType):
    """`from entmtp import generate` is the library's function, also when this module has been imported before."""

    def __call__(self, *args, **kwargs):
        from entmtp.api import generate

        return generate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
