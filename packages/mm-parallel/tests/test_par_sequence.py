"""How a sequence is cut, put together again, and told its positions."""

from __future__ import annotations

import pytest
import torch

from mm_parallel import ContextParallel, MeshSizes, ParallelMesh, count_communication
from mm_parallel.attention.layout import SequenceLayout

DEGREES = [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (3, 1), (1, 3), (2, 3), (3, 2)]


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(("ulysses", "ring"), DEGREES)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 48, 75, 76])
def test_every_token_has_one_place(length, ulysses, ring, zigzag):
    """B047, B048, B054, B055: any length, padding included, in both orders."""
    layout = SequenceLayout(length, ulysses, ring, zigzag=zigzag and ring > 1)
    assert layout.padded >= length
    assert layout.padded == layout.local * layout.size == layout.chunk * layout.ring
    places = [place for run in layout.runs for place in range(run.global_start, run.global_start + run.length)]
    assert places == list(range(length))
    held = {rank: sum(run.length for run in layout.runs_of(rank)) for rank in range(layout.size)}
    assert max(held.values()) <= layout.local
    for rank in range(layout.size):  # real tokens come first in every rank's part
        end = 0
        for run in layout.runs_of(rank):
            assert run.local_start == end
            end += run.length


def test_plain_order_is_contiguous_and_zigzag_pairs_first_with_last():
    plain = SequenceLayout(16, 2, 2, zigzag=False)
    assert [[(r.global_start, r.length) for r in plain.runs_of(i)] for i in range(4)] == [
        [(0, 4)],
        [(4, 4)],
        [(8, 4)],
        [(12, 4)],
    ]
    zigzag = SequenceLayout(16, 1, 4, zigzag=True)
    assert [[(r.global_start, r.length) for r in zigzag.runs_of(i)] for i in range(4)] == [
        [(0, 2), (14, 2)],
        [(2, 2), (12, 2)],
        [(4, 2), (10, 2)],
        [(6, 2), (8, 2)],
    ]


def test_a_zigzag_part_may_hold_the_end_of_one_run_and_the_start_of_another():
    layout = SequenceLayout(36, 3, 2, zigzag=True)  # runs of 9, parts of 6
    assert layout.padded == 36
    assert [(r.global_start, r.length) for r in layout.runs_of(1)] == [(6, 3), (27, 3)]


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        ContextParallel.single().shard(0)


@pytest.mark.numeric
def test_one_rank_is_the_identity():
    x = torch.randn(2, 7, 3)
    shard = ContextParallel.single().shard(7, causal=True)
    assert shard.split(x) is x
    assert shard.gather(x) is x
    assert shard.positions().tolist() == list(range(7))
    q, k, v = torch.randn(3, 2, 7, 2, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    with count_communication() as counted:
        assert shard.attention(q, k, v).equal(expected)
    assert str(counted) == "no communication"


CASES = [(length, causal, dim) for length in (1, 3, 75, 76) for causal in (False, True) for dim in (1, -1)]


def round_trips(rank, world, sizes):
    context = ParallelMesh.build(sizes).context_parallel()
    outcome = []
    for length, causal, dim in CASES:
        shape = [2, 3, 2]
        shape[dim] = length
        generator = torch.Generator().manual_seed(length)
        x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        shard = context.shard(length, causal=causal)
        part = shard.split(x, dim)
        back = shard.gather(part, dim)
        (back * weights).sum().backward()
        mine = shard.positions()
        real = min(shard.local_length, sum(run.length for run in shard._runs))
        local_rows = x.detach().index_select(dim, mine[:real])
        outcome.append(
            (
                back.equal(x),
                part.narrow(dim, 0, real).equal(local_rows)
                and not part.narrow(dim, real, shard.local_length - real).any(),
                # Each rank's gradient is its own slice times the group's size: the mean over ranks is the whole.
                x.grad / world,
                weights,
            )
        )
    return outcome


@pytest.mark.numeric
@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (1, 4), (2, 2), (1, 3), (3, 1)])
def test_split_then_gather_is_the_identity_and_so_is_its_mean_gradient(run_ranks, ulysses, ring):
    """B054: bit for bit, for lengths that divide and that don't, also where some ranks hold only padding."""
    sizes = MeshSizes(shard=ulysses * ring, ulysses=ulysses, ring=ring)
    ranks = run_ranks(round_trips, sizes.world, sizes)
    for case in range(len(CASES)):
        assert all(found[case][0] and found[case][1] for found in ranks), CASES[case]
        gradient = sum(found[case][2] for found in ranks)
        torch.testing.assert_close(gradient, ranks[0][case][3], rtol=1e-15, atol=0)  # x × 3 / 3 may round


def test_positions_are_those_of_the_whole_sequence():
    """B056: rotary angles of a 3-D grid (t, h, w) that is no cube, looked up by local positions, on every rank."""
    grid = torch.cartesian_prod(torch.arange(5), torch.arange(3), torch.arange(5))
    for layout_sizes, causal in (((4, 1), False), ((1, 4), False), ((1, 4), True), ((2, 2), True)):
        seen = []
        for rank in range(4):
            shard = FakeContext(*layout_sizes, rank).shard(75, causal=causal)
            mine = shard.positions()
            assert mine.shape == (shard.local_length,)
            local = grid[mine]
            for run in shard._runs:
                rows = slice(run.local_start, run.local_start + run.length)
                assert local[rows].equal(grid[run.global_start : run.global_start + run.length])
            seen += mine[: sum(run.length for run in shard._runs)].tolist()
        assert sorted(seen) == list(range(75))


class FakeContext(ContextParallel):
    """One rank's view without its peers."""

    def __init__(self, ulysses, ring, rank):
        super().__init__()
        self.size, self.rank = ulysses * ring, rank
        self.ring = Sized(ring) if ring > 1 else None
        self.ulysses = Sized(ulysses) if ulysses > 1 else None


class Sized:
    def __init__(self, n):
        self.n = n

    def size(self):
        return self.n


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.split(torch.zeros(1, 74, 2)), r"split: expected 75 tokens along dim 1, got shape \(1, 74, 2\)"),
        (lambda s: s.gather(torch.zeros(1, 75, 2)), r"gather: expected 19 tokens .*75 tokens on 4 ranks, 19 each"),
        (lambda s: s.attention(*torch.zeros(3, 1, 75, 6, 2)), "attention: expected 19 tokens"),
        (lambda s: s.attention(torch.zeros(1, 19, 6), *torch.zeros(2, 1, 19, 6)), "expected q, k, v of one shape"),
        (
            lambda s: s.attention(*torch.zeros(3, 1, 19, 6, 2)),
            r"4 doesn't divide the 6 attention heads \(allowed: 1, 2, 3, 6\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_any_collective(call, message):
    """B048, B049: a clear error with the numbers."""
    with pytest.raises(ValueError, match=message):
        call(FakeContext(4, 1, 0).shard(75))


def draw_masks(rank, world_size):
    """Masks for a whole activation, a split one, and the whole one after it; and again, as recompute would."""
    mesh = ParallelMesh.build(MeshSizes(shard=world_size, ulysses=world_size), device_type="cpu")
    shard = mesh.context_parallel().shard(12)
    torch.manual_seed(3)
    ones = torch.ones(2, 12, 4)

    def masks(x):
        whole = torch.dropout(x, 0.5, True)
        with shard.local_randomness():
            part = torch.dropout(shard.split(x), 0.5, True)
        return whole, part, torch.dropout(x, 0.5, True)

    found = [mask.clone() for mask in masks(ones)]
    x = ones.requires_grad_()
    torch.manual_seed(3)
    torch.utils.checkpoint.checkpoint(lambda: sum(mask.sum() for mask in masks(x)), use_reentrant=False).backward()
    return [mask.detach().numpy() for mask in found], x.grad.numpy()


def test_masks_of_split_activations_differ_between_ranks_and_those_of_whole_ones_do_not(run_ranks):
    (first, gradient), (second, _) = run_ranks(draw_masks, 2)
    for place, equal in ((0, True), (1, False), (2, True)):
        assert (first[place] == second[place]).all() == equal, place
    assert (first[0] != first[2]).any()
    # d(sum of dropped x)/dx is the sum of the masks: the backward, which draws again, must have met the same ones.
    expected = first[0] + first[2]
    expected[:, :6] += first[1]
    assert (gradient == expected).all()


def test_on_one_rank_local_randomness_changes_nothing():
    shard = ContextParallel.single().shard(8)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with shard.local_randomness():
        assert torch.equal(torch.rand(3), expected)
