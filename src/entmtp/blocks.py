"""`python -m entmtp.blocks "prompt" mtp=FOLDER [overrides]`: the second method's text, as its blocks are committed."""

import argparse
import sys
import time
from collections.abc import Iterator

from entmtp.command import exit_status
from entmtp.errors import EntmtpError

LONGEST = 2048  # positions of prompt and text
MARK = "│"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m entmtp.blocks",
        description="Generate text with a multi-token model: several tokens a forward, unverified (ConfAdapt) or not.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""\
mtp=FOLDER            a multi-token model, or an adapter for the target (results/confadapt/distill/short)
threshold=P           commit the longest prefix of predictions that are at least this sure (default 0.9)
masks=P               the same of all but the first, which is committed however sure
static=K              commit always K predictions instead
verify=true           commit what the model itself would say one by one: the same text, sooner
k_max=N               most predictions a forward (default 8)
further overrides are Hydra's (dtype=bfloat16, target=NAME, …)

examples:
  python -m entmtp.blocks "Continue: 21, 22, 23, 24, 25, 26," mtp=results/confadapt/distill/short --show
  python -m entmtp.blocks "How much is 12 + 30?" mtp=results/confadapt/distill/short threshold=0.7

With --show every block ends with {MARK}. The last line on stderr has tokens a forward and tokens/s.""",
    )
    parser.add_argument("prompt", help="the user's turn")
    parser.add_argument("options", nargs="+", metavar="key=value", help="see below")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    parser.add_argument("--show", action="store_true", help=f"end every block with {MARK}")
    return parser.parse_intermixed_args(arguments)


def pieces(engine, prompt: str, most: int) -> Iterator[tuple[str, int]]:
    """Printable text and number of tokens of every block."""
    from entmtp.decoding.text_stream import TextStream
    from entmtp.tasks.prompts import encode

    target = engine.decoder.target
    text = TextStream(target.tokenizer)
    for tokens, _ in engine.stream(encode(target.tokenizer, [{"role": "user", "content": prompt}]), most, 0.0):
        yield text.push(tokens), len(tokens)
    yield text.close(), 0


def run(arguments: argparse.Namespace) -> None:
    from entmtp.lm_engines import open_engine

    options = dict(option.partition("=")[::2] for option in arguments.options)
    if "mtp" not in options:
        raise EntmtpError("mtp=FOLDER is missing: a multi-token model's folder, or an adapter's")
    engine = open_engine(options, LONGEST)
    start, blocks = time.perf_counter(), []
    for text, count in pieces(engine, arguments.prompt, arguments.max_new_tokens):
        blocks += [count] if count else []
        print(text, end=MARK if arguments.show and count else "", flush=True)
    seconds = time.perf_counter() - start
    print(flush=True)
    tokens, forwards = sum(blocks), len(blocks)
    print(f"{tokens} tokens in {forwards} forwards | {tokens / forwards:.2f} tokens a forward | {tokens / seconds:.1f} "
          f"tokens/s | longest block {max(blocks)} | {engine.verdict}", file=sys.stderr)  # fmt: skip


def main() -> int:
    arguments = parse(sys.argv[1:])
    return exit_status(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
