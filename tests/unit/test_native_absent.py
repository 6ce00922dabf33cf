"""Where the compiled engine cannot be had, or only by another command. Most of it needs no compiler itself."""

import os
import subprocess
import sys

import pytest

from entmtp.target import native


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )


CODE = """
import torch
from entmtp.target.linear import make_linear
from entmtp.target.native import library
linear = make_linear(torch.ones(4, 3))
print(library(torch.float32) is not None, linear(torch.ones(1, 3)).tolist())
"""


def test_it_works_without_a_compiler_or_where_compiling_fails(tmp_path):
    off = python(CODE, ENTMTP_NATIVE="0")
    assert (off.stdout.split(maxsplit=1), off.stderr) == (["False", "[[3.0, 3.0, 3.0, 3.0]]\n"], "")
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'native.c: no such luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    failed = python(CODE, CC=str(broken), ENTMTP_CACHE=str(tmp_path / "cache"))
    assert failed.stdout.startswith("False")
    assert failed.stderr == (
        f"warning: {broken} cannot compile native.c (native.c: no such luck): decoding is slower\n"
    )
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_a_compiler_that_is_not_there_is_said(tmp_path):
    missing = python(CODE, CC="no-such-compiler", ENTMTP_CACHE=str(tmp_path))
    assert missing.stdout.startswith("False") and "warning: the compiled engine cannot be had" in missing.stderr


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler on this machine")
def test_the_compiler_may_be_a_command_with_options(tmp_path):
    made = python(CODE, CC=f"{native.compiler()} -DNOTHING", ENTMTP_CACHE=str(tmp_path))
    assert made.stdout.startswith("True") and made.stderr == ""
