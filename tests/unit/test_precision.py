"""Which dtype `auto` stands for: what the device has instructions for."""

import pytest
import torch

from entmtp.target import precision
from entmtp.target.precision import processor_features, resolved


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f amx_bf16\nflags : fpu\n", "bfloat16"),
        ("flags\t\t: fpu avx512f avx512_bf16 avx512vl\n", "bfloat16"),
        ("processor : 0\nFeatures\t: fp asimd bf16\n", "bfloat16"),
        ("vendor_id : GenuineIntel\nflags\t\t: fpu avx512f avx512_vnni\n", "float32"),
        ("", "float32"),
    ],
)
def test_auto_on_a_processor(tmp_path, monkeypatch, text, dtype):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    monkeypatch.setattr(precision, "processor_features", lambda: processor_features(str(path)))
    assert resolved("auto", "cpu") == dtype
    assert resolved("float16", "cpu") == "float16"


def test_a_system_that_does_not_say(tmp_path):
    assert processor_features(str(tmp_path / "missing")) == frozenset()


@pytest.mark.parametrize(("has", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_on_a_gpu(monkeypatch, has, dtype):
    def supported(including_emulation: bool = True) -> bool:
        assert not including_emulation  # emulated is slow
        return has

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert resolved("auto", "cuda") == resolved("auto", "cuda:0") == dtype
