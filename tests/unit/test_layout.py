"""The regions of a layout hold exactly a block's bytes, each once, in the documented order.

Property tests make caches of random shape, stride order, padding and sharing in real memory, and
compare with torch's own indexing: what regions gather, what a scatter leaves untouched, and whether
the fingerprint alone is enough to rebuild a slot. Then the layouts of real engines, and everything
that must be refused.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.errors import LayoutError
from kvdisk.layout import Layout, Region
from kvdisk.layout_overlap import find_overlap

DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32]


def memory(address: int, length: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=np.uint8)


def gather(layout: Layout, block: int) -> bytes:
    return b"".join(
        memory(region.address + block * region.block_stride_bytes, region.segment_bytes).tobytes()
        for region in layout.regions
    )


def scatter(layout: Layout, block: int, slot: bytes) -> None:
    at = 0
    for region in layout.regions:
        target = memory(region.address + block * region.block_stride_bytes, region.segment_bytes)
        target[:] = np.frombuffer(slot[at : at + region.segment_bytes], dtype=np.uint8)
        at += region.segment_bytes
    assert at == len(slot)


def content_of(tensor: torch.Tensor) -> bytes:
    """The elements in logical order. A fresh tensor, since views keep odd strides of size 1."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.flatten())
    return flat.view(torch.uint8).numpy().tobytes()


def in_memory_order(tensor: torch.Tensor, block_dim: int, block: int) -> bytes:
    """A block's bytes as torch sees them, dimensions ordered by stride."""
    part = tensor.select(block_dim, block)
    order = sorted(range(part.dim()), key=lambda dim: (part.size(dim) > 1, -part.stride(dim)))
    return content_of(part.permute(order))


def element_addresses(tensor: torch.Tensor, block_dim: int, block: int) -> list[int]:
    """The address of every byte of a block, by definition and one by one."""
    part = tensor.select(block_dim, block)
    size = part.element_size()
    return [
        part.data_ptr()
        + size * sum(i * stride for i, stride in zip(place, part.stride(), strict=True))
        + byte
        for place in itertools.product(*map(range, part.shape))
        for byte in range(size)
    ]


def rebuilt_from_fingerprint(
    layout: Layout, tensors: list[torch.Tensor], dims: list[int], block: int
) -> bytes:
    fields = json.loads(json.dumps(layout.fingerprint_fields()))
    whole = []
    for tensor, dim, content in zip(tensors, dims, fields["tensors"], strict=True):
        part = tensor.select(dim, block)
        rest = [d for d in range(part.dim()) if d not in content["order"]]
        whole.append(content_of(part.permute(rest + content["order"])))
        assert content["block_shape"] == list(part.shape)
    return b"".join(whole[t][at : at + length] for t, at, length in fields["pieces"])


@dataclass
class Caches:
    """Tensors on random memory, and every allocation they lie in."""

    tensors: list[torch.Tensor]
    block_dims: list[int]
    allocations: list[torch.Tensor]


@st.composite
def caches(draw: st.DrawFn) -> Caches:
    block_count = draw(st.integers(1, 4))
    found = Caches([], [], [])
    for _ in range(draw(st.integers(1, 3))):
        views = draw(st.integers(1, 3))  # views of one allocation, told apart by dimension 0
        inner = draw(st.lists(st.integers(1, 3), max_size=3))
        shape = [views, block_count, *inner]
        padded = [size + draw(st.integers(0, 1)) for size in shape]
        memory_order = draw(st.permutations(range(len(shape))))
        dtype = draw(st.sampled_from(DTYPES))
        lead = draw(st.integers(0, 2))
        total = lead + math.prod(padded)
        allocation = torch.empty(total, dtype=dtype)
        raw = allocation.view(torch.uint8)
        raw.copy_(torch.from_numpy(np.random.default_rng(total).integers(0, 256, raw.numel())))
        base = allocation[lead:].view([padded[dim] for dim in memory_order])
        base = base.permute([memory_order.index(dim) for dim in range(len(shape))])
        for dim, size in enumerate(shape):
            base = base.narrow(dim, padded[dim] - size, size)
        found.allocations.append(allocation)
        for view in draw(st.permutations(range(views))):
            tensor = base[view]
            block_dim = draw(st.integers(0, tensor.dim() - 1))
            order = [dim for dim in range(tensor.dim()) if dim != 0]
            order.insert(block_dim, 0)
            found.tensors.append(tensor.permute(order))
            found.block_dims.append(block_dim - draw(st.sampled_from([0, tensor.dim()])))
    return found


@settings(max_examples=300, deadline=None)
@given(caches())
def test_regions_hold_exactly_the_blocks_bytes(found: Caches) -> None:
    layout = Layout.from_tensors(found.tensors, block_dim=found.block_dims)
    covered: list[int] = []
    for block in range(layout.block_count):
        wanted = [
            address
            for tensor, dim in zip(found.tensors, found.block_dims, strict=True)
            for address in element_addresses(tensor, dim, block)
        ]
        addresses = [
            address
            for region in layout.regions
            for start in [region.address + block * region.block_stride_bytes]
            for address in range(start, start + region.segment_bytes)
        ]
        assert sorted(addresses) == sorted(wanted)
        covered += addresses
        slot = gather(layout, block)
        assert len(slot) == layout.block_bytes
        assert slot == rebuilt_from_fingerprint(layout, found.tensors, found.block_dims, block)
    assert len(set(covered)) == len(covered)


@settings(max_examples=100, deadline=None)
@given(caches())
def test_tensors_apart_follow_one_another_in_memory_order(found: Caches) -> None:
    apart = [tensor.clone() for tensor in found.tensors]  # clone keeps the stride order
    layout = Layout.from_tensors(apart, block_dim=found.block_dims)
    for block in range(layout.block_count):
        expected = [
            in_memory_order(tensor, dim, block)
            for tensor, dim in zip(apart, found.block_dims, strict=True)
        ]
        assert gather(layout, block) == b"".join(expected)


@settings(max_examples=150, deadline=None)
@given(caches(), st.randoms(use_true_random=False))
def test_scatter_restores_a_block_and_touches_nothing_else(found: Caches, random: object) -> None:
    layout = Layout.from_tensors(found.tensors, block_dim=found.block_dims)
    block = random.randrange(layout.block_count)  # type: ignore[attr-defined]
    raw = [allocation.view(torch.uint8) for allocation in found.allocations]
    before = [each.clone() for each in raw]
    slot = gather(layout, block)

    scatter(layout, block, bytes(byte ^ 0xFF for byte in slot))
    changed = sum(int((now != old).sum()) for now, old in zip(raw, before, strict=True))
    assert changed == layout.block_bytes
    assert gather(layout, block) == bytes(byte ^ 0xFF for byte in slot)

    scatter(layout, block, slot)
    assert all(torch.equal(now, old) for now, old in zip(raw, before, strict=True))


@settings(max_examples=100, deadline=None)
@given(caches())
def test_numpy_arrays_give_the_same_layout(found: Caches) -> None:
    tensors = [t for t in found.tensors if t.dtype != torch.bfloat16]
    dims = [
        dim
        for t, dim in zip(found.tensors, found.block_dims, strict=True)
        if t.dtype != torch.bfloat16
    ]
    if not tensors:
        return
    from_torch = Layout.from_tensors(tensors, block_dim=dims)
    from_numpy = Layout.from_tensors([t.numpy() for t in tensors], block_dim=dims)
    assert from_numpy == from_torch
    assert from_numpy.fingerprint_fields() == from_torch.fingerprint_fields()


# The layouts of real engines --------------------------------------------------------------------

LAYERS, BLOCKS, TOKENS, HEADS, HEAD = 4, 6, 16, 2, 8
BLOCK = TOKENS * HEADS * HEAD * 2  # bytes of K of one layer in float16


def test_one_tensor_per_layer_is_one_region_per_layer() -> None:
    layers = [torch.zeros(BLOCKS, 2, TOKENS, HEADS, HEAD, dtype=torch.half) for _ in range(LAYERS)]
    layout = Layout.from_tensors(layers)
    assert layout.regions == tuple(Region(t.data_ptr(), 2 * BLOCK, 2 * BLOCK) for t in layers)
    assert layout.block_count == BLOCKS
    assert layout.block_bytes == LAYERS * 2 * BLOCK
    assert layout.device == "cpu"


def test_keys_and_values_apart_are_two_regions_per_layer() -> None:
    layer = torch.zeros(2, BLOCKS, TOKENS, HEADS, HEAD, dtype=torch.half)
    layout = Layout.from_tensors([layer], block_dim=1)
    assert layout.regions == (
        Region(layer.data_ptr(), BLOCK, BLOCK),
        Region(layer.data_ptr() + BLOCKS * BLOCK, BLOCK, BLOCK),
    )


def test_blocks_outermost_is_a_single_region() -> None:
    pool = torch.zeros(BLOCKS, LAYERS, 2, TOKENS, HEADS, HEAD, dtype=torch.half)
    whole = Layout.from_tensors(pool)
    views = Layout.from_tensors([pool[:, layer] for layer in range(LAYERS)])
    shuffled = Layout.from_tensors([pool[:, layer] for layer in (2, 0, 3, 1)])
    assert whole.regions == views.regions == shuffled.regions
    assert len(whole.regions) == 1
    assert whole.regions[0].segment_bytes == whole.block_bytes


def test_layers_in_one_allocation_or_many_give_interchangeable_bytes() -> None:
    pool = torch.zeros(BLOCKS, LAYERS, 2, TOKENS, HEADS, HEAD, dtype=torch.half)
    inside = Layout.from_tensors([pool[:, layer] for layer in range(LAYERS)])
    apart = Layout.from_tensors([pool[:, layer].clone() for layer in range(LAYERS)])
    padded = torch.zeros(2 * BLOCKS, LAYERS, 2, TOKENS, HEADS, HEAD, dtype=torch.half)[::2]
    strided = Layout.from_tensors([padded[:, layer] for layer in range(LAYERS)])
    assert inside.fingerprint_fields() == apart.fingerprint_fields() == strided.fingerprint_fields()


def test_head_and_token_order_is_told_apart_by_strides_alone() -> None:
    nhd = torch.zeros(BLOCKS, 2, TOKENS, HEADS, HEAD, dtype=torch.half)
    hnd = torch.zeros(BLOCKS, 2, HEADS, TOKENS, HEAD, dtype=torch.half).permute(0, 1, 3, 2, 4)
    assert nhd.shape == hnd.shape
    a, b = Layout.from_tensors([nhd]), Layout.from_tensors([hnd])
    assert len(a.regions) == len(b.regions) == 1
    assert a.fingerprint_fields() != b.fingerprint_fields()


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(BLOCKS, TOKENS, 64, dtype=torch.bfloat16),
        torch.zeros(BLOCKS, 64, TOKENS, dtype=torch.half),
        torch.zeros(BLOCKS, TOKENS, 32, dtype=torch.half),
        torch.zeros(BLOCKS, 64, TOKENS, dtype=torch.half).permute(0, 2, 1),
    ],
    ids=["dtype", "shape", "size", "stride order"],
)
def test_one_changed_property_changes_the_fingerprint(other: torch.Tensor) -> None:
    base = Layout.from_tensors([torch.zeros(BLOCKS, TOKENS, 64, dtype=torch.half)])
    assert Layout.from_tensors([other]).fingerprint_fields() != base.fingerprint_fields()


def test_block_count_and_addresses_do_not_change_the_fingerprint() -> None:
    one, two = torch.zeros(3, 8), torch.zeros(300, 8)
    assert (
        Layout.from_tensors([one]).fingerprint_fields()
        == Layout.from_tensors([two]).fingerprint_fields()
    )


def test_latent_cache_without_heads() -> None:
    layers = [torch.zeros(BLOCKS, TOKENS, 576, dtype=torch.bfloat16) for _ in range(LAYERS)]
    layout = Layout.from_tensors(layers)
    assert [region.segment_bytes for region in layout.regions] == [TOKENS * 576 * 2] * LAYERS


def test_padding_inside_a_block_makes_more_regions() -> None:
    wide = torch.zeros(BLOCKS, TOKENS, 2 * HEAD)
    layout = Layout.from_tensors([wide[:, :, :HEAD]])
    assert len(layout.regions) == TOKENS
    assert layout.regions[1].address - layout.regions[0].address == 2 * HEAD * 4


def test_rows_of_a_host_pool_with_padded_stride() -> None:
    pool = np.zeros((BLOCKS, 4096), dtype=np.int8)
    layout = Layout.from_tensors(pool[:, :3000])
    assert layout.regions == (Region(pool.ctypes.data, 4096, 3000),)
    assert layout.slot_bytes(512) == 3072
    assert layout.slot_bytes(4096) == 4096
    with pytest.raises(LayoutError, match="power of two"):
        layout.slot_bytes(1000)


def test_a_single_block_has_no_stride_that_was_made_up() -> None:
    layout = Layout.from_tensors([torch.zeros(1, 4, 8), torch.zeros(1, 8)])
    assert [(r.block_stride_bytes, r.segment_bytes) for r in layout.regions] == [
        (128, 128),
        (32, 32),
    ]


def test_the_layout_keeps_the_memory_alive() -> None:
    array = np.full((2, 64), 7, dtype=np.uint8)
    layout = Layout.from_tensors([array])
    del array
    assert gather(layout, 1) == bytes([7]) * 64
    assert len(layout.owners) == 1


# What must be refused ---------------------------------------------------------------------------

POOL = torch.zeros(8, 4, 16)


@pytest.mark.parametrize(
    ("tensors", "block_dim", "says"),
    [
        ([], 0, "pass the engine's KV caches"),
        ({"layer.0": POOL}, 0, r"list\(tensors.values\(\)\)"),
        (7, 0, "pass a list"),
        (["layer.0"], 0, "pass torch tensors or numpy arrays"),
        ([POOL], 3, "no dimension block_dim=3"),
        ([POOL], -4, "no dimension block_dim=-4"),
        ([POOL], [0, 0], "names 2 dimensions for 1 tensors"),
        ([torch.zeros(0, 4)], 0, "is empty"),
        ([torch.zeros(4, 1).expand(4, 8)], 0, "a stride is 0"),
        ([torch.zeros(1, 8).expand(4, 8)], 0, "a stride is 0"),
        ([np.zeros((4, 8))[:, ::-1]], 0, "a stride is negative"),
        ([np.zeros((4, 8))[::-1]], 0, "a stride is negative"),
        ([torch.zeros(64).as_strided((4, 4, 4), (16, 2, 1))], 0, "elements share memory"),
        ([torch.zeros(64).as_strided((4, 8), (4, 1))], 0, "blocks share memory"),
        ([torch.zeros(64).as_strided((4, 2, 2), (4, 4, 1))], 0, "blocks share memory"),
        ([POOL, torch.zeros(9, 4, 16)], 0, "tensor 1 differs from tensor 0 in blocks: 9"),
        ([POOL, POOL], 0, "tensors 0 and 1 share memory"),
        ([torch.zeros(8, 2), POOL[:, :3], POOL[:, 2:]], 0, "tensors 1 and 2 share memory"),
        ([POOL, torch.zeros(8, 4, device="meta")], 0, "has no memory"),
        ([torch.eye(4).to_sparse()], 0, "pass a dense tensor"),
        ([np.broadcast_to(np.zeros(8), (4, 8))], 0, "read-only"),
        ([np.array([[object()]])], 0, "Python objects"),
        ([torch.zeros(1 << 19, 2, dtype=torch.uint8)], 1, "falls into 524288 pieces"),
        ([torch.zeros(1 << 17, 2, dtype=torch.uint8)], 1, "falls into 131072 pieces"),
    ],
)
def test_refused(tensors: object, block_dim: int | list[int], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        Layout.from_tensors(tensors, block_dim=block_dim)


@pytest.mark.parametrize(
    ("regions", "block_count", "block_bytes", "says"),
    [
        ((), 1, 0, "at least one"),
        ((Region(4096, 64, 64),), 0, 64, "at least one block"),
        ((Region(4096, 64, 64),), 2, 128, "add up to 64"),
        ((Region(4096, 0, 64),), 2, 64, "must be positive"),
        ((Region(4096, 32, 64),), 2, 64, "regions 0 and 0 share memory"),
        ((Region(4096, 128, 64), Region(4128, 128, 64)), 2, 128, "regions 0 and 1 share"),
    ],
)
def test_refused_regions(
    regions: tuple[Region, ...], block_count: int, block_bytes: int, says: str
) -> None:
    with pytest.raises(LayoutError, match=says):
        Layout(regions, block_count, block_bytes)


def test_bare_regions_are_told_apart_by_their_segments() -> None:
    a = Layout((Region(4096, 64, 32), Region(8192, 64, 32)), 4, 64)
    b = Layout((Region(4096, 64, 64),), 4, 64)
    assert a.fingerprint_fields() != b.fingerprint_fields()


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(
        st.builds(Region, st.integers(1, 60), st.sampled_from([3, 8, 8, 8, 12]), st.integers(1, 6)),
        min_size=1,
        max_size=5,
    ),
)
def test_overlap_is_found_exactly(block_count: int, regions: list[Region]) -> None:
    bytes_of = [
        [
            region.address + block * region.block_stride_bytes + byte
            for block in range(block_count)
            for byte in range(region.segment_bytes)
        ]
        for region in regions
    ]
    every = list(itertools.chain.from_iterable(bytes_of))
    overlap = find_overlap(regions, block_count)
    assert (overlap is not None) == (len(set(every)) < len(every))
    if overlap is not None:
        first, second = overlap
        shared = (
            set(bytes_of[first]) & set(bytes_of[second])
            if first != second
            else len(set(bytes_of[first])) < len(bytes_of[first])
        )
        assert shared
