"""KV caches on a GPU in the layouts that serving engines register, and an engine to move them.

What is compared is whole allocations: what a load must write, it has written, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvdisk.layout import Layout
from kvdisk.transfer import Events, TransferEngine, TransferResult

PATIENCE_S = 60.0  # a bound against hanging tests, never a measurement
POISON = 0xA5
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Caches:
    """The tensors of one layout, and which of their dimensions counts blocks."""

    tensors: list[torch.Tensor]
    block_dims: list[int]

    def blocks(self, number: int) -> torch.Tensor:
        """Tensor ``number`` as plain integers, blocks outermost."""
        tensor = self.tensors[number]
        return tensor.view(_INTEGERS[tensor.element_size()]).movedim(self.block_dims[number], 0)

    def storages(self) -> list[torch.Tensor]:
        """Every allocation under the tensors, as bytes."""
        found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.tensors}
        return [torch.tensor([], dtype=torch.uint8, device="cuda").set_(s) for s in found.values()]


def _same(tensors: list[torch.Tensor], block_dim: int = 0) -> Caches:
    return Caches(tensors, [block_dim] * len(tensors))


def _layers(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(count)]


def _hnd(blocks: int) -> Caches:
    """Heads before tokens in memory, tokens before heads in the tensors' dimensions."""
    keys_and_values = _layers(16, blocks, 8, 16, 128)
    return _same([each.permute(0, 2, 1, 3) for each in keys_and_values])


def _block_outermost(blocks: int) -> Caches:
    pool = torch.empty((blocks, 24, 2, 16, 2, 128), dtype=torch.bfloat16, device="cuda")
    return _same([pool[:, layer] for layer in range(24)])


def _fp8_with_scales(blocks: int) -> Caches:
    values = _layers(32, blocks, 2, 16, 8, 128, dtype=torch.float8_e4m3fn)
    scales = _layers(32, blocks, 2, 8, dtype=torch.float32)
    return _same([each for pair in zip(values, scales, strict=True) for each in pair])


def _hybrid(blocks: int) -> Caches:
    """Attention with K and V apart, and mamba's states: tensors of different kinds and dtypes."""
    attention = _layers(4, 2, blocks, 16, 2, 64)
    convolution = _layers(12, blocks, 3, 1792)
    states = _layers(12, blocks, 8, 64, 32, dtype=torch.float32)
    return Caches(attention + convolution + states, [1] * 4 + [0] * 24)


def _padded(blocks: int) -> Caches:
    """Rows with padding between them, and lengths that no vector divides."""
    padded = _layers(4, blocks, 16, 136)
    odd = _layers(3, blocks, 1037, dtype=torch.uint8)
    return _same([each[..., :128] for each in padded] + odd)


LAYOUTS: dict[str, Callable[[int], Caches]] = {
    "llama-3-8b, 32 x 64 KiB": lambda n: _same(_layers(32, n, 2, 16, 8, 128)),
    "llama-3-8b of 8 ranks, 32 x 8 KiB": lambda n: _same(_layers(32, n, 2, 16, 1, 128)),
    "llama-3-70b of 8 ranks, 80 x 8 KiB": lambda n: _same(_layers(80, n, 2, 16, 1, 128)),
    "MLA, 61 x 18 KiB": lambda n: _same(_layers(61, n, 16, 576)),
    "fp8 with scales": _fp8_with_scales,
    "hybrid with states": _hybrid,
    "K and V apart": lambda n: _same(_layers(16, 2, n, 16, 4, 128), 1),
    "heads first": _hnd,
    "blocks outermost": _block_outermost,
    "padded and odd": _padded,
}


class Rig:
    """An engine over ``half`` blocks to store from and as many to load into."""

    def __init__(self, caches: Caches, half: int, directory: Path, **options: Any) -> None:
        self.caches, self.half = caches, half
        self.layout = Layout.from_tensors(caches.tensors, block_dim=caches.block_dims)
        slot_bytes = self.layout.slot_bytes(4096)
        self.files = [
            os.open(directory / f"{name}-{id(self)}", os.O_RDWR | os.O_CREAT, 0o600)
            for name in ("data", "records")
        ]
        os.ftruncate(self.files[0], half * slot_bytes)
        self.engine = TransferEngine(
            self.layout,
            data_fd=self.files[0],
            record_fd=self.files[1],
            slot_bytes=slot_bytes,
            slot_count=half,
            **{"iodepth": 16, "buffers": 32, "load_reserve": 8, **options},
        )
        self.results: dict[int, TransferResult] = {}
        self.source_free: set[int] = set()

    def close(self, timeout_s: float = 5.0) -> int:
        abandoned = self.engine.close(timeout_s)
        self._take(self.engine.poll())
        for descriptor in self.files:
            os.close(descriptor)
        self.files = []
        return abandoned

    def randomise(self, blocks: Sequence[int], generator: torch.Generator) -> None:
        """Fresh bytes in these blocks, on torch's current stream."""
        where = torch.tensor(blocks, device="cuda")
        for number in range(len(self.caches.tensors)):
            whole = self.caches.blocks(number)
            shape = (len(blocks), *whole.shape[1:])
            info = torch.iinfo(whole.dtype)
            whole[where] = torch.randint(
                info.min, info.max, shape, dtype=whole.dtype, device="cuda", generator=generator
            )

    def fill(self, blocks: Sequence[int], value: int) -> None:
        """The same value everywhere in these blocks, on torch's current stream."""
        where = torch.tensor(blocks, device="cuda")
        for number in range(len(self.caches.tensors)):
            self.caches.blocks(number)[where] = value

    def poison(self) -> None:
        for storage in self.caches.storages():
            storage.fill_(POISON)

    def store(self, blocks: Sequence[int], slots: Sequence[int], **options: Any) -> int:
        transfer = self.engine.submit_store(keys(slots), list(slots), list(blocks), **options)
        assert transfer is not None
        return transfer

    def load(self, blocks: Sequence[int], slots: Sequence[int], **options: Any) -> int:
        return self.engine.submit_load(keys(slots), list(slots), list(blocks), **options)

    def finish(self, transfer: int) -> TransferResult:
        while transfer not in self.results:
            assert self.engine.wait(PATIENCE_S), "a transfer did not end"
            self._take(self.engine.poll())
        return self.results[transfer]

    def until_source_free(self, transfer: int) -> None:
        while transfer not in self.source_free:
            assert self.engine.wait(PATIENCE_S), "a source did not become free"
            self._take(self.engine.poll())

    def _take(self, events: Events) -> None:
        self.source_free.update(events.source_free)
        for result in events.finished:
            assert result.transfer_id not in self.results, "a transfer ended twice"
            self.results[result.transfer_id] = result

    def same(self, first: int, second: int) -> bool:
        """Whether two blocks have the same bytes."""
        return all(
            torch.equal(self.caches.blocks(n)[first], self.caches.blocks(n)[second])
            for n in range(len(self.caches.tensors))
        )


def keys(slots: Sequence[int]) -> list[bytes]:
    return [b"block-%d" % slot for slot in slots]


def round_trip(rig: Rig, rounds: int, seed: int) -> None:
    """Fresh blocks, shuffled block and slot ids, the rest poisoned; compares whole allocations."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shuffle = torch.Generator().manual_seed(seed)
    everything = torch.arange(2 * rig.half)
    for number in range(rounds):
        order = everything[torch.randperm(2 * rig.half, generator=shuffle)].tolist()
        sources, targets = order[: rig.half], order[rig.half :]
        slots = torch.randperm(rig.half, generator=shuffle).tolist()
        rig.poison()
        rig.randomise(sources, generator)
        written = torch.cuda.Event()
        written.record()
        stored = rig.store(sources, slots, event=written)
        assert rig.finish(stored).ok, f"round {number}, seed {seed}"
        expected = [storage.clone() for storage in rig.caches.storages()]
        before = [storage.clone() for storage in expected]
        torch.cuda.synchronize()
        loaded = rig.load(targets, slots)
        assert rig.finish(loaded).ok, f"round {number}, seed {seed}"
        found = [storage.clone() for storage in rig.caches.storages()]
        # What torch makes of the same move, in the same memory.
        for storage, content in zip(rig.caches.storages(), before, strict=True):
            storage.copy_(content)
        for index in range(len(rig.caches.tensors)):
            whole = rig.caches.blocks(index)
            whole[torch.tensor(targets, device="cuda")] = whole[
                torch.tensor(sources, device="cuda")
            ]
        for storage, content in zip(rig.caches.storages(), found, strict=True):
            assert torch.equal(storage, content), f"round {number}, seed {seed}: other bytes"
