"""Without isolation nothing is executed. These tests need no sandbox themselves, so they run where there is none."""

import sys

import pytest

from entmtp.errors import EntmtpError
from entmtp.evaluation import sandbox
from entmtp.evaluation.sandbox import check_sandbox, run


def test_where_no_isolation_can_be_had_nothing_is_executed(monkeypatch, tmp_path):
    """A launcher without any rights, as in a container without namespaces: a clear refusal, and no execution."""
    marker = tmp_path / "executed"
    script = tmp_path / "jail.py"
    source = (sandbox.HERE / "jail.py").read_text()
    # the system's own answer where namespaces are forbidden
    script.write_text(source.replace("checked(LIBC.unshare(", "ctypes.set_errno(1)\n    checked(-1 or (", 1))
    (tmp_path / "runner.py").write_text(f"open({str(marker)!r}, 'w').close()")
    monkeypatch.setattr(sandbox, "HERE", tmp_path)
    check_sandbox.cache_clear()
    try:
        with pytest.raises(EntmtpError, match=r"this machine has none \(\[Errno 1\] unshare: Operation not permitted"):
            run(["pass"])
        with pytest.raises(EntmtpError, match="execute_code=false"):
            run(["pass"])
    finally:
        check_sandbox.cache_clear()
    assert not marker.exists()


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    check_sandbox.cache_clear()
    try:
        with pytest.raises(EntmtpError, match="it needs Linux, this is darwin"):
            run(["pass"])
    finally:
        check_sandbox.cache_clear()
