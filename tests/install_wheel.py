"""`make test-wheel`: build the wheel, install it with its dependencies into an empty environment, use it far from the
checkout. Needs a package index; everything else that is tested of the wheel is in tests/unit/test_package.py."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CITATION.cff", "src", "conf",
           "workflow/schemas", "workflow/report", "docs/reproduction")  # fmt: skip

# the README's five lines, on a model and heads that are made here
EXAMPLE = """
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import entmtp
from entmtp import generate, load
from entmtp.config import TargetConfig
from entmtp.heads.model import DraftHeads, HeadsFormat, save_heads
from entmtp.target.fetch import fetch_target

assert Path(entmtp.__file__).is_relative_to(sys.argv[1]), entmtp.__file__
folder = fetch_target(TargetConfig(name="tiny", source="random"), "tiny")
target = load(folder).target
form = HeadsFormat("hydra", 4, 1, target.hidden_size, 100, target.fingerprint)
heads = DraftHeads(form, torch.randperm(target.vocab_size)[:100])
heads.reset(0)
save_heads(heads, "heads")

lm = load("tiny", "heads", policy="fixed_16")
made = generate(lm, "Write a function that reverses a string.", max_new_tokens=24, stop_ids=())
print(made)

plain = generate(load("tiny"), "Write a function that reverses a string.", max_new_tokens=24, stop_ids=())
assert made.tokens == plain.tokens and len(made.tokens) == 24, (made.tokens, plain.tokens)
assert made.lossless == "exact" and made.forwards[0].nodes == 16
print(f"{len(made.tokens)} tokens, those of plain decoding, in {len(made.forwards)} steps of 16 nodes")
"""


def build_wheel(work: Path) -> Path:
    """The project's wheel in `work`, built offline from a copy of the sources, so that the checkout stays as it is."""
    source, made = work / "source", work / "wheel"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, ignore=leave)
        else:
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--no-build-isolation", "--wheel-dir", str(made), str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the wheel does not build: {done.stderr[-2000:]}")
    return next(made.glob("*.whl"))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="entmtp-wheel-") as folder:
        work = Path(folder)
        wheel, environment = build_wheel(work), work / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        elsewhere = work / "elsewhere"
        elsewhere.mkdir()
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}

        def run(command: str, *arguments: str) -> None:
            print(f"$ {command} {' '.join(argument for argument in arguments if len(argument) < 99)}", flush=True)
            subprocess.run([environment / "bin" / command, *arguments], check=True, cwd=elsewhere, env=clean)

        run("python", "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "requirements.lock"), str(wheel))
        run("python", "-m", "pip", "check")
        run("entmtp", "--version")
        run("entmtp")
        run("entmtp", "generate", "--help")
        run("python", "-m", "entmtp.generate", "Hello", "experiment=smoke", "policy=ar", "max_new_tokens=8")
        run("python", "-c", EXAMPLE, str(environment))
    print("the wheel works in an empty environment")


if __name__ == "__main__":
    main()
