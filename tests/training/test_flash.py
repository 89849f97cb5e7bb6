"""What flash-attn is asked for: its arguments, read as its documentation has them, give packed attention."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from slime_core.training.torch_backend.flash import _installed_kernel, flash_attention, flash_kernel
from slime_core.training.torch_backend.packing import pack, packed_attention

LENGTHS = np.array([5, 9, 1])


def naive_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
):
    """flash_attn_varlen_func as documented, token by token: [T, H, D], windows (left, right), -1 for no end."""
    assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    out = torch.zeros_like(q)
    repeats = q.shape[1] // k.shape[1]
    for start, end in pairwise(cu_seqlens_q.tolist()):
        for i in range(start, end):
            first = start if window_size[0] < 0 else max(start, i - window_size[0])
            for head in range(q.shape[1]):
                scores = (k[first : i + 1, head // repeats] @ q[i, head]) * (softmax_scale or q.shape[-1] ** -0.5)
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                out[i, head] = scores.softmax(0) @ v[first : i + 1, head // repeats]
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_both_kernels_compute_the_same(scaling, window, softcap):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 15, 8), torch.randn(1, 2, 15, 8), torch.randn(1, 2, 15, 8)
    packed = pack(LENGTHS, torch.device("cpu"))
    expected, _ = packed_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        packed=packed,
        scaling=scaling,
        sliding_window=window,
        softcap=softcap,
    )
    got = flash_attention(
        naive_varlen,
        query,
        key,
        value,
        packed.bounds,
        packed.max_length,
        scaling=scaling,
        window=window,
        softcap=softcap,
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_no_flash_on_a_cpu():
    assert flash_kernel(torch.device("cpu"), torch.bfloat16) is None


def test_a_broken_install_warns_once_and_leaves_torchs_attention(tmp_path, monkeypatch, caplog):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('flash_attn_2_cuda.so: undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    _installed_kernel.cache_clear()
    try:
        found = [flash_kernel(torch.device("cuda"), torch.bfloat16) for _ in range(3)]
    finally:
        _installed_kernel.cache_clear()
    assert found == [None] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "undefined symbol" in caplog.text
