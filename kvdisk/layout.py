"""Where a block's bytes lie in device memory: regions, found from tensors by pure arithmetic.

Serving engines keep KV in every conceivable order: layers outermost or blocks outermost, K and V
apart or together, heads before tokens or after, padded, or as views of one shared allocation. All
of that becomes the same thing here: regions, each a strided range that holds one segment of every
block. Nothing is copied, and no tensor is read.

The order of a block's bytes ("slot order"), which always holds:
    1. Tensors follow one another as given. Tensors whose memory interleaves, because they are views
       of one allocation, count as one tensor in the place of the first of them.
    2. Within that, bytes are in ascending address order, so the tensor's own dimension order does
       not matter, its strides do.
So equal tensors give equal order in every process, wherever their allocations happen to lie.
``fingerprint_fields`` describes the order completely: when it is equal, bytes are reusable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvdisk.errors import LayoutError
from kvdisk.layout_overlap import clusters, find_overlap

# A block in more pieces than this would be copied almost byte by byte.
_PIECES_MAX: Final = 1 << 18
_REGIONS_MAX: Final = 1 << 16
_FORMAT: Final = 1


@dataclass(frozen=True)
class Region:
    """``segment_bytes`` of every block: block ``b`` at ``address + b * block_stride_bytes``."""

    address: int
    block_stride_bytes: int
    segment_bytes: int


@dataclass(frozen=True)
class Layout:
    """How a block's bytes are gathered: its segments, region after region.

    ``block_count`` blocks of ``block_bytes`` each, the sum of the regions' segments. ``device`` is
    "cpu" or the tensors' device such as "cuda:1"; an index or a torch.device becomes that, and
    "cuda" is whatever is current on the thread that opens an engine. ``owners`` keeps the memory
    alive. Raises LayoutError when the regions overlap or do not add up.
    """

    regions: tuple[Region, ...]
    block_count: int
    block_bytes: int
    device: str = "cpu"
    owners: tuple[object, ...] = field(default=(), compare=False, repr=False)
    _content: Mapping[str, object] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        given: object = self.device
        device = f"cuda:{given}" if isinstance(given, int) else str(given)
        object.__setattr__(self, "device", device)
        if self.block_count < 1:
            raise LayoutError(f"block_count={self.block_count}: there must be at least one block.")
        if not self.regions:
            raise LayoutError("no regions: a block needs at least one.")
        if len(self.regions) > _REGIONS_MAX:
            raise LayoutError(_too_many(len(self.regions), self.block_bytes))
        for index, region in enumerate(self.regions):
            if region.address <= 0 or region.segment_bytes <= 0 or region.block_stride_bytes <= 0:
                raise LayoutError(f"region {index}: address, stride and segment must be positive.")
        total = sum(region.segment_bytes for region in self.regions)
        if total != self.block_bytes:
            raise LayoutError(
                f"block_bytes={self.block_bytes}, but the segments add up to {total}."
            )
        overlap = find_overlap(self.regions, self.block_count)
        if overlap is not None:
            raise LayoutError(f"regions {overlap[0]} and {overlap[1]} share memory between blocks.")

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Any] | Any, *, block_dim: int | Sequence[int] = 0
    ) -> Layout:
        """The layout of tensors that together hold every block.

        ``tensors`` are torch tensors (any strided device) or numpy arrays, of any shape and stride
        order, or a single one. ``block_dim`` is the dimension that counts blocks, one for all or
        one per tensor, negative from the end: 0 for ``(num_blocks, ...)``, 1 for
        ``(2, num_blocks, ...)``. It must have the same size in all.

        The regions are the fewest possible: dimensions that follow one another in memory become one
        segment, and so do neighbouring views of one allocation. A list of layers, each a view of
        one block-outermost allocation, gives a single region.

        Raises LayoutError, saying which tensor and what to do, for zero or negative strides, memory
        shared between blocks or tensors, differing block counts or devices, and blocks that fall
        into more than 65,536 segments.
        """
        listed = _as_list(tensors)
        dims = _block_dims(block_dim, len(listed))
        cuts = [
            _cut(_describe(tensor, index), dim, index)
            for index, (tensor, dim) in enumerate(zip(listed, dims, strict=True))
        ]
        _require_equal([cut.block_count for cut in cuts], "blocks", "check block_dim")
        _require_equal([cut.array.device for cut in cuts], "device", "make one layout per device")
        pieces = sum(len(cut.offsets) for cut in cuts)
        block_bytes = sum(len(cut.offsets) * cut.run_bytes for cut in cuts)
        if pieces > _PIECES_MAX:
            raise LayoutError(_too_many(pieces, block_bytes))

        groups = _pieces_in_slot_order(cuts)
        _require_disjoint([piece for group in groups for piece in group], cuts[0].block_count)
        return cls(
            regions=tuple(_merged_regions(groups, cuts[0].block_count)),
            block_count=cuts[0].block_count,
            block_bytes=block_bytes,
            device=cuts[0].array.device,
            owners=tuple(listed),
            _content={
                "format": _FORMAT,
                "block_bytes": block_bytes,
                "tensors": [_content_of(cut) for cut in cuts],
                "pieces": _merged_pieces(piece for group in groups for piece in group),
            },
        )

    def slot_bytes(self, alignment: int) -> int:
        """Bytes of a slot: ``block_bytes`` rounded up to ``alignment`` bytes, a power of two."""
        if alignment < 1 or alignment & (alignment - 1):
            raise LayoutError(f"alignment={alignment}: must be a power of two.")
        return (self.block_bytes + alignment - 1) & ~(alignment - 1)

    def fingerprint_fields(self) -> dict[str, object]:
        """What must be equal for the bytes of two layouts to be interchangeable; JSON-ready.

        From tensors: each one's dtype, shape of a block, and order of its dimensions in memory; and
        which piece of which tensor lies where in the slot. Addresses, padding, the number of blocks
        and how the pieces are cut into regions are left out, since they do not change the bytes.
        From bare regions: the segment sizes. What tensors cannot tell, such as the head order of an
        opaque int8 page, the caller has to add to the identity.
        """
        if self._content is not None:
            return dict(self._content)
        segments = [region.segment_bytes for region in self.regions]
        return {"format": _FORMAT, "block_bytes": self.block_bytes, "segments": segments}


# From here on: one tensor at a time -------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    """A tensor without its library. Strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    dtype: str
    device: str


@dataclass(frozen=True)
class _Cut:
    """A tensor cut into blocks: block 0 is ``run_bytes`` at each of ``offsets``, ascending."""

    array: _Array
    block_count: int
    block_stride: int
    block_shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions of the block, outermost in memory first, without size 1
    run_bytes: int
    offsets: Sequence[int]
    extent_bytes: int  # from the first to behind the last byte of a block


@dataclass(frozen=True)
class _Piece:
    """A contiguous part of a block: ``region`` holds bytes ``offset_bytes`` ff. of its tensor."""

    tensor: int
    offset_bytes: int
    region: Region


def _as_list(tensors: Any) -> list[Any]:
    if _is_tensor(tensors):
        return [tensors]
    if isinstance(tensors, (Mapping, str, bytes)) or not isinstance(tensors, Iterable):
        advice = "pass list(tensors.values())" if isinstance(tensors, Mapping) else "pass a list"
        raise LayoutError(f"tensors is a {type(tensors).__name__}: {advice}.")
    listed = list(tensors)
    if not listed:
        raise LayoutError("no tensors: pass the engine's KV caches.")
    return listed


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") or hasattr(value, "__array_interface__")


def _block_dims(block_dim: int | Sequence[int], tensor_count: int) -> list[int]:
    if isinstance(block_dim, int):
        return [block_dim] * tensor_count
    dims = list(block_dim)
    if len(dims) != tensor_count:
        raise LayoutError(
            f"block_dim names {len(dims)} dimensions for {tensor_count} tensors: "
            "give one for all, or one per tensor."
        )
    return dims


def _describe(tensor: Any, index: int) -> _Array:
    if hasattr(tensor, "data_ptr"):
        return _describe_torch(tensor, index)
    if hasattr(tensor, "__array_interface__"):
        return _describe_numpy(tensor, index)
    raise LayoutError(
        f"tensor {index} is a {type(tensor).__name__}: pass torch tensors or numpy arrays."
    )


def _describe_torch(tensor: Any, index: int) -> _Array:
    try:
        item_bytes = int(tensor.element_size())
        strides = tuple(int(stride) * item_bytes for stride in tensor.stride())
        address = int(tensor.data_ptr())
    except RuntimeError as error:
        raise LayoutError(
            f"tensor {index} has no strided memory ({tensor.layout}, {tensor.device}): "
            "pass a dense tensor."
        ) from error
    shape = tuple(int(size) for size in tensor.shape)
    if address == 0 and 0 not in shape:
        raise LayoutError(f"tensor {index} has no memory (device {tensor.device}): allocate first.")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Array(address, shape, strides, item_bytes, dtype, str(tensor.device))


def _describe_numpy(array: Any, index: int) -> _Array:
    address, read_only = array.__array_interface__["data"]
    if read_only:
        raise LayoutError(f"tensor {index} is read-only: a load could not write into it.")
    if array.dtype.hasobject:
        raise LayoutError(f"tensor {index} holds Python objects: pass numbers.")
    dtype = array.dtype.name if array.dtype.isnative else array.dtype.str
    return _Array(int(address), array.shape, array.strides, array.dtype.itemsize, str(dtype), "cpu")


def _cut(array: _Array, block_dim: int, index: int) -> _Cut:
    """Cut a tensor into blocks, each in as few contiguous runs as its strides allow."""
    rank = len(array.shape)
    where = f"tensor {index}, shape {array.shape}, strides {array.strides} bytes"
    if not -rank <= block_dim < rank:
        raise LayoutError(f"{where}: has no dimension block_dim={block_dim}.")
    block_dim %= rank
    if 0 in array.shape:
        raise LayoutError(f"{where}: is empty.")
    for size, stride in zip(array.shape, array.strides, strict=True):
        if size > 1 and stride == 0:
            raise LayoutError(f"{where}: is expanded (a stride is 0); pass a tensor of its own.")
        if size > 1 and stride < 0:
            raise LayoutError(f"{where}: runs backwards (a stride is negative); pass it unflipped.")

    block_shape = array.shape[:block_dim] + array.shape[block_dim + 1 :]
    strides = array.strides[:block_dim] + array.strides[block_dim + 1 :]
    order = tuple(
        sorted((dim for dim in range(rank - 1) if block_shape[dim] > 1), key=lambda d: -strides[d])
    )
    extent = run = array.item_bytes
    outer: list[int] = []  # dimensions that no longer follow on, innermost first
    for dim in reversed(order):
        if strides[dim] < extent:
            raise LayoutError(f"{where}: elements share memory; pass a tensor of its own.")
        if not outer and strides[dim] == run:
            run *= block_shape[dim]
        else:
            outer.append(dim)
        extent += strides[dim] * (block_shape[dim] - 1)

    pieces = 1
    for dim in outer:
        pieces *= block_shape[dim]
    if pieces > _PIECES_MAX:
        raise LayoutError(f"{where}: {_too_many(pieces, pieces * run)}")
    offsets = [0]
    for dim in reversed(outer):
        steps = range(0, strides[dim] * block_shape[dim], strides[dim])
        offsets = [offset + step for offset in offsets for step in steps]
    return _Cut(
        array=array,
        block_count=array.shape[block_dim],
        block_stride=array.strides[block_dim] if array.shape[block_dim] > 1 else extent,
        block_shape=block_shape,
        order=order,
        run_bytes=run,
        offsets=offsets,
        extent_bytes=extent,
    )


# From here on: all tensors together -------------------------------------------------------------


def _require_equal(values: Sequence[object], what: str, advice: str) -> None:
    for index, value in enumerate(values):
        if value != values[0]:
            raise LayoutError(
                f"tensor {index} differs from tensor 0 in {what}: {value} against {values[0]}; "
                f"{advice}."
            )


def _pieces_in_slot_order(cuts: Sequence[_Cut]) -> list[list[_Piece]]:
    """Pieces of block 0, grouped: tensors that interleave in memory share a group."""
    extents = [
        (
            cut.array.address,
            cut.array.address + cut.block_stride * (cut.block_count - 1) + cut.extent_bytes,
        )
        for cut in cuts
    ]
    groups = []
    for members in sorted(sorted(cluster) for cluster in clusters(extents)):
        group = [
            _Piece(
                tensor,
                number * cuts[tensor].run_bytes,
                Region(
                    cuts[tensor].array.address + offset,
                    cuts[tensor].block_stride,
                    cuts[tensor].run_bytes,
                ),
            )
            for tensor in members
            for number, offset in enumerate(cuts[tensor].offsets)
        ]
        group.sort(key=lambda piece: piece.region.address)
        groups.append(group)
    return groups


def _require_disjoint(pieces: Sequence[_Piece], block_count: int) -> None:
    overlap = find_overlap([piece.region for piece in pieces], block_count)
    if overlap is None:
        return
    first, second = sorted(pieces[index].tensor for index in overlap)
    if first == second:
        raise LayoutError(
            f"tensor {first}: blocks share memory with one another; check block_dim and strides."
        )
    raise LayoutError(
        f"tensors {first} and {second} share memory: pass every byte once (layers that share one "
        "cache are listed once)."
    )


def _merged_regions(groups: Sequence[Sequence[_Piece]], block_count: int) -> list[Region]:
    """Join neighbours. Never across groups, whose distance is an accident of the allocator."""
    regions: list[Region] = []
    for group in groups:
        start = len(regions)
        for piece in group:
            region = piece.region
            if block_count == 1:
                # One block has no stride; its segments must not differ by one that is made up.
                region = Region(region.address, 1, region.segment_bytes)
            last = regions[-1] if len(regions) > start else None
            if (
                last is not None
                and last.block_stride_bytes == region.block_stride_bytes
                and last.address + last.segment_bytes == region.address
            ):
                regions.pop()
                region = Region(
                    last.address, last.block_stride_bytes, last.segment_bytes + region.segment_bytes
                )
            regions.append(region)
    if block_count == 1:
        return [Region(each.address, each.segment_bytes, each.segment_bytes) for each in regions]
    return regions


def _merged_pieces(pieces: Iterable[_Piece]) -> list[list[int]]:
    """``[tensor, offset, length]`` in slot order, offsets within the tensor's own block."""
    merged: list[list[int]] = []
    for piece in pieces:
        length = piece.region.segment_bytes
        if merged and merged[-1][0] == piece.tensor and sum(merged[-1][1:]) == piece.offset_bytes:
            merged[-1][2] += length
        else:
            merged.append([piece.tensor, piece.offset_bytes, length])
    return merged


def _content_of(cut: _Cut) -> dict[str, object]:
    return {
        "dtype": cut.array.dtype,
        "block_shape": list(cut.block_shape),
        "order": list(cut.order),
    }


def _too_many(pieces: int, block_bytes: int) -> str:
    return (
        f"a block of {block_bytes} bytes falls into {pieces} pieces; keep the dimensions of a "
        "block together in memory (block_dim outermost, or close to it)."
    )
