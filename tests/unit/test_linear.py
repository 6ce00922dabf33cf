"""Packed linear layers are `F.linear`."""

import pytest
import torch
import torch.nn.functional as F

from entmtp.target.linear import make_linear
from entmtp.target.native import library


@pytest.mark.parametrize(("pack", "native"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_packed_equals_plain(dtype, tolerance, bias, pack, native):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 36, generator=generator).to(dtype)
    offset = torch.randn(70, generator=generator).to(dtype) if bias else None
    linear = make_linear(weight, offset, pack=pack, native=native)
    for rows in (1, 2, 15, 16, 17, 64, 200):
        x = torch.randn(rows, 36, generator=generator).to(dtype)
        expected = F.linear(x, weight, offset)
        got = linear(x)
        assert got.dtype == (torch.float32 if native and library(dtype) else dtype)
        got = got.to(dtype)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_does_not_alias_the_callers_weight(dtype):
    weight = torch.randn(8, 6).to(dtype).t()  # not contiguous, as a transposed checkpoint would be
    x = torch.randn(3, 8).to(dtype)
    expected = F.linear(x, weight)
    torch.testing.assert_close(make_linear(weight)(x).to(dtype), expected, rtol=1e-2, atol=1e-2)
