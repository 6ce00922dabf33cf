"""`entmtp --version`, and what the commands are. Needs nothing but the standard library."""

import argparse
import sys

from entmtp import __version__


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="entmtp",
        description="Draft trees for multi-token prediction: the tokens of plain decoding, in fewer steps.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""\
commands (in a checkout of the repository, where conf/ and the Snakefile are):
  snakemake --cores all                  calibrate, measure and report (`make reproduce`)
  python -m entmtp.generate "prompt"     text as it is committed
  python -m entmtp.sweep -m ...          thresholds, as a Hydra multirun
anywhere:
  from entmtp import load, generate      one's own transformers model""",
    )
    parser.add_argument("--version", action="version", version=f"entmtp {__version__}")
    parser.parse_args(arguments)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
