"""Attention across ranks against plain attention on one, in float64, and the kernels it is made of."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from numbers_close import BF16_BLOCK, assert_near

from mm_parallel import ContextParallel, MeshSizes, ParallelMesh, count_communication
from mm_parallel.attention.kernels import KERNELS, choose_kernel

pytestmark = pytest.mark.numeric

CASES = [(length, causal, kernel) for length in (64, 75, 3) for causal in (False, True) for kernel in ("auto", "math")]


def inputs(length, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(4, 2, length, 12, 8, generator=generator, dtype=dtype).unbind()


def plain(length, causal, scale=None):
    q, k, v, upstream = inputs(length)
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, scale=scale)
    out.transpose(1, 2).backward(upstream)
    return out.transpose(1, 2).detach(), q.grad, k.grad, v.grad


def attend(rank, world, sizes):
    mesh = ParallelMesh.build(sizes)
    outcome = []
    for length, causal, kernel in CASES:
        shard = mesh.context_parallel(kernel=kernel).shard(length, causal=causal)
        q, k, v, upstream = inputs(length)
        local = [shard.split(t).clone().requires_grad_() for t in (q, k, v)]
        out = shard.attention(*local, scale=0.3)
        out.backward(shard.split(upstream))
        with torch.no_grad():
            outcome.append([shard.gather(t) for t in (out, *(t.grad for t in local))])
    return outcome


@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (1, 4), (2, 2), (1, 3), (3, 1)])
def test_attention_and_its_gradients_equal_plain_attention(run_ranks, ulysses, ring):
    """B054, B055: float64, random upstream gradients, batch 2, both masks, 64, 75 and 3 tokens; to 1e-10."""
    ranks = run_ranks(attend, ulysses * ring, MeshSizes(shard=ulysses * ring, ulysses=ulysses, ring=ring))
    for index, (length, causal, _) in enumerate(CASES):
        expected = plain(length, causal, scale=0.3)
        for found in ranks:
            for got, reference in zip(found[index], expected, strict=True):
                assert (got - reference).abs().max() <= 1e-10, CASES[index]


def six_heads(rank, world):
    context = ParallelMesh.build(MeshSizes(shard=4, ulysses=2, ring=2)).context_parallel()
    shard = context.shard(75)
    q, k, v, _ = (t[:, :, :6] for t in inputs(75))
    with torch.no_grad():
        return shard.gather(shard.attention(shard.split(q), shard.split(k), shard.split(v)))


def test_six_heads_on_ulysses_2_and_ring_2(run_ranks):
    """B049: what Ulysses 4 can't do, Ulysses 2 × ring 2 can."""
    for out in run_ranks(six_heads, 4):
        assert (out - plain(75, False)[0][:, :, :6]).abs().max() <= 1e-12


def in_bf16(rank, world):
    context = ParallelMesh.build(MeshSizes(shard=world, ring=world)).context_parallel()
    shard = context.shard(70)
    q, k, v, upstream = (t.to(torch.bfloat16) for t in inputs(70))
    local = [shard.split(t).clone().requires_grad_() for t in (q, k, v)]
    out = shard.attention(*local)
    out.backward(shard.split(upstream))
    with torch.no_grad():
        return [shard.gather(t) for t in (out, *(t.grad for t in local))]


def test_ring_attention_in_bf16_keeps_dtype_and_accuracy(run_ranks):
    for found in run_ranks(in_bf16, 3):
        for got, reference in zip(found, plain(70, False), strict=True):
            assert got.dtype == torch.bfloat16
            assert_near(got, reference, BF16_BLOCK)


def recomputed_twice(rank, world):
    """The ring's backward may not touch what the forward saved: a second backward gives the same again."""
    mesh = ParallelMesh.build(MeshSizes(shard=world, ring=world))
    shard = mesh.context_parallel().shard(10)
    q, k, v, upstream = (shard.split(t) for t in inputs(10))
    local = [t.clone().requires_grad_() for t in (q, k, v)]
    out = shard.attention(*local)
    out.backward(upstream, retain_graph=True)
    first = [t.grad.clone() for t in local]
    with count_communication(mesh) as counted:
        out.backward(upstream)
    return all((2 * a).equal(t.grad) for a, t in zip(first, local, strict=True)), counted.total(kind="send").calls


def test_ring_hops_and_repeated_backward(run_ranks):
    """n - 1 hops of keys and values and n - 1 of their gradients in the backward; see [Note: Ring]."""
    assert run_ranks(recomputed_twice, 3) == [(True, 2 + 2)] * 3


def block_inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 2, 6, 8, generator=generator, dtype=dtype).unbind()
    return q, k, v, dout


def by_autograd(q, k, v, dout, causal):
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * 0.5
    if causal:
        scores = scores + torch.full_like(scores, float("-inf")).triu(1)
    out = scores.softmax(-1) @ v
    out.backward(dout)
    return out.detach(), scores.logsumexp(-1).detach(), (q.grad, k.grad, v.grad)


def check_kernel(kernel, causal, dtype=torch.float64, tolerance=1e-12):
    q, k, v, dout = block_inputs(dtype)
    out, lse = kernel.forward(q, k, v, causal, 0.5)
    expected_out, expected_lse, expected = by_autograd(q, k, v, dout, causal)
    assert (out - expected_out).abs().max() <= tolerance
    assert (lse - expected_lse).abs().max() <= tolerance
    for got, reference in zip(kernel.backward(dout, q, k, v, out, lse, causal, 0.5), expected, strict=True):
        assert (got - reference).abs().max() <= tolerance


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["math", "cpu_flash"])
def test_kernels_return_out_and_lse_and_true_gradients(name, causal):
    check_kernel(KERNELS[name], causal)


def stand_in_for_torch_npu(calls):
    """torch_npu's documented functions, computed plainly: BNSD layout, max and sum per row, repeated 8 times."""

    def scores_of(query, key, scale, atten_mask, sparse_mode):
        scores = query @ key.transpose(-1, -2) * scale
        if sparse_mode == 3:
            assert atten_mask.shape == (2048, 2048)
            assert atten_mask.dtype == torch.bool
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        else:
            assert (atten_mask, sparse_mode) == (None, 0)
        return scores

    def npu_fusion_attention(
        query, key, value, head_num, input_layout, *, scale, keep_prob, atten_mask=None, sparse_mode=0
    ):
        assert (head_num, input_layout, keep_prob) == (query.shape[1], "BNSD", 1.0)
        calls.append("forward")
        scores = scores_of(query, key, scale, atten_mask, sparse_mode)
        maximum = scores.amax(-1, keepdim=True)
        total = (scores - maximum).exp().sum(-1, keepdim=True)
        out = (scores - maximum).exp() / total @ value
        return out, maximum.expand(-1, -1, -1, 8), total.expand(-1, -1, -1, 8), torch.empty(0), 0, 0, 0

    def npu_fusion_attention_grad(
        query,
        key,
        value,
        dy,
        head_num,
        input_layout,
        *,
        softmax_max,
        softmax_sum,
        attention_in,
        scale_value,
        keep_prob,
        atten_mask=None,
        sparse_mode=0,
    ):
        assert (head_num, input_layout, keep_prob) == (query.shape[1], "BNSD", 1.0)
        assert softmax_max.shape == softmax_sum.shape == (*query.shape[:3], 8)
        calls.append("backward")
        scores = scores_of(query, key, scale_value, atten_mask, sparse_mode)
        p = (scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
        ds = p * (dy @ value.transpose(-1, -2) - (dy * attention_in).sum(-1, keepdim=True)) * scale_value
        return ds @ key, ds.transpose(-1, -2) @ query, p.transpose(-1, -2) @ dy, torch.empty(0)

    return types.SimpleNamespace(
        npu_fusion_attention=npu_fusion_attention, npu_fusion_attention_grad=npu_fusion_attention_grad
    )


@pytest.mark.parametrize("causal", [False, True])
def test_npu_adapter_against_a_stand_in(monkeypatch, causal):
    """No NPU here: layout, scale, and max and sum → log-sum-exp are checked against the documented signature."""
    calls = []
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in_for_torch_npu(calls))
    check_kernel(KERNELS["npu"], causal)
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("causal", [False, True])
def test_cuda_flash_adapter_against_a_stand_in(monkeypatch, causal):
    """No CUDA here: the aten operator's documented arguments and results are checked against plain mathematics."""

    def forward(query, key, value, dropout_p, is_causal, return_debug_mask, *, scale):
        assert (dropout_p, return_debug_mask) == (0.0, False)
        out, lse = KERNELS["math"].forward(query, key, value, is_causal, scale)
        return out, lse, None, None, query.shape[2], key.shape[2], torch.empty(0), torch.empty(0), torch.empty(0)

    def backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        *,
        scale,
    ):
        assert (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p) == (None, None, query.shape[2], key.shape[2], 0.0)
        return KERNELS["math"].backward(grad_out, query, key, value, out, logsumexp, is_causal, scale)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", forward)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", backward)
    check_kernel(KERNELS["flash"], causal)


def test_cuda_flash_adapter_fits_the_real_operators():
    """The same calls on meta tensors: torch itself checks arguments and shapes, and computes nothing."""
    q = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 4, 24, 8, device="meta", dtype=torch.bfloat16)
    out, lse = KERNELS["flash"].forward(q, k, k, False, 0.3)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    gradients = KERNELS["flash"].backward(out, q, k, k, out, lse, False, 0.3)
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]


def test_kernel_choice_is_explicit_or_automatic_and_reported_once(caplog):
    half = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    assert choose_kernel("auto", half).name == "cpu_flash"
    assert choose_kernel("math", half).name == "math"
    with caplog.at_level(logging.INFO, logger="mm_parallel"):
        for _ in range(3):
            choose_kernel("auto", half.to(torch.float16))
    assert [record.message for record in caplog.records] == [
        "context-parallel attention on cpu in torch.float16 uses the kernel 'cpu_flash'"
    ]
    with pytest.raises(ValueError, match="attention_kernel: flash runs on cuda in bf16 or fp16, got cpu"):
        choose_kernel("flash", half)
    with pytest.raises(ValueError, match="attention_kernel: expected one of auto, .* got 'fast'"):
        choose_kernel("fast", half)


def test_an_explicit_kernel_is_used_on_a_single_rank_too():
    q, k, v, _ = inputs(5)
    out = ContextParallel.single(kernel="math").shard(5).attention(q, k, v)
    assert (out - plain(5, False)[0]).abs().max() <= 1e-12
