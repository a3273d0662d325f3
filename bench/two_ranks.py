"""Two ranks in two processes, one GPU each, on one disk and in one namespace: checks and figures.

    python bench/two_ranks.py --path /mnt/nvme/bench --device cuda --output bench/results/....json

This process is the scheduler. Each worker is a process that sees one GPU (CUDA_VISIBLE_DEVICES), so
that both call it device 0; what keeps their files apart is the engine's global rank. Blocks are
random, made on the device from key, round and rank, and compared there.

Checked: 50 rounds of concurrent stores and loads, bytes equal on both; no CUDA context of either on
the other's GPU; a block damaged on one rank is a miss on both; one worker killed with SIGKILL and
started again while the other goes on, with what it had stored. Measured: both ranks at once against
one alone on the same disk, and against one block at a time in each direction. ``--device cpu`` runs
the same without GPUs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvdisk import Identity, RowStatus, TierConfig, TierScheduler
from kvdisk.messages import Transfer

RANKS = 2
LAYERS = 32
LAYER_BYTES = 64 << 10  # of a block: Llama-3-8B, 16 tokens of bf16
BLOCK_BYTES = LAYERS * LAYER_BYTES
BLOCKS = 256  # half to store from, half to load into
BATCH = 64
PATIENCE_S = 60.0


# --- a worker's process


class Blocks:
    """The rank's KV cache on its device, and what belongs into each block."""

    def __init__(self, device: str, rank: int) -> None:
        import torch

        self.torch = torch
        self.device = device
        self.rank = rank
        self.layers = [
            torch.zeros(BLOCKS, LAYER_BYTES // 8, dtype=torch.int64, device=device)
            for _ in range(LAYERS)
        ]

    def content(self, key: int) -> Any:
        generator = self.torch.Generator(device=self.device).manual_seed(key * RANKS + self.rank)
        return self.torch.randint(
            -(2**62),
            2**62,
            (LAYERS, LAYER_BYTES // 8),
            dtype=self.torch.int64,
            device=self.device,
            generator=generator,
        )

    def fill(self, keys: list[int], blocks: list[int]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            for layer, rows in zip(self.layers, self.content(key), strict=True):
                layer[block] = rows
        self.synchronize()

    def poison(self, blocks: list[int]) -> None:
        for layer in self.layers:
            layer[blocks] = -1
        self.synchronize()

    def wrong(self, keys: list[int], blocks: list[int]) -> int:
        """How many of the blocks do not hold what belongs there, byte for byte."""
        self.synchronize()
        wrong = 0
        for key, block in zip(keys, blocks, strict=True):
            right = self.content(key)
            found = self.torch.stack([layer[block] for layer in self.layers])
            wrong += not bool(self.torch.equal(found, right))
        return wrong

    def synchronize(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()


def work(rank: int, device: str, visible: str, path: str, capacity: int, pipe: Connection) -> None:
    """Serve the scheduler's process until it says stop."""
    if device != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    from kvdisk import Layout, TierWorker

    blocks = Blocks("cuda:0" if device != "cpu" else "cpu", rank)
    layout = Layout.from_tensors(blocks.layers)
    config = make_config(path, capacity)
    worker = TierWorker.open(layout, make_identity(), config, rank=rank, world_size=RANKS)
    pipe.send(worker.take_opened())
    while True:
        command, *arguments = pipe.recv()
        if command == "submit":
            worker.submit(arguments[0])
        elif command == "poll":
            worker.wait(arguments[0])
            pipe.send(worker.poll())
        elif command == "stop":
            worker.close()
            pipe.send(None)
            return
        else:
            pipe.send(getattr(blocks, command)(*arguments))


def make_identity() -> Identity:
    return Identity(
        model="two ranks",
        weights="none",
        dtype="int64",
        block_tokens=16,
        layout={"layers": LAYERS, "layer_bytes": LAYER_BYTES},
        key_hash="numbers",
        parallel={"tensor": RANKS},
    )


def make_config(path: str, capacity: int) -> TierConfig:
    # What waits is neither dropped nor given up: what is measured is all that was asked for.
    patient = {"store_wait": "10s", "store_deadline": "60s", "load_deadline": "60s"}
    return TierConfig.from_mapping({"path": path, "capacity": capacity, **patient})


# --- the scheduler's process


class Pair:
    """Both workers and the scheduler between them."""

    def __init__(self, path: Path, device: str, capacity: int) -> None:
        self.path, self.device, self.capacity = path, device, capacity
        self.context = multiprocessing.get_context("spawn")
        self.scheduler = TierScheduler(
            make_config(str(path), capacity), BLOCK_BYTES, world_size=RANKS
        )
        self.processes: list[Any] = [None] * RANKS
        self.pipes: list[Any] = [None] * RANKS
        for rank in range(RANKS):
            self.start(rank)

    def start(self, rank: int) -> None:
        ours, theirs = self.context.Pipe()
        arguments = (rank, self.device, str(rank), str(self.path), self.capacity, theirs)
        self.processes[rank] = self.context.Process(target=work, args=arguments, daemon=True)
        self.processes[rank].start()
        theirs.close()
        self.pipes[rank] = ours
        self.scheduler.attach(ours.recv())

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].join()
        self.scheduler.detach(rank)

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """The same of both ranks, at the same time."""
        for pipe in self.pipes:
            pipe.send((command, *arguments))
        return [pipe.recv() for pipe in self.pipes]

    def wrong_alone(self, rank: int, keys: list[int]) -> int:
        """Of one rank: how many of the blocks that ``fill`` put at the first sources are wrong."""
        self.pipes[rank].send(("wrong", keys, SOURCES[: len(keys)]))
        return int(self.pipes[rank].recv())

    def submit(self, transfer: Transfer) -> int:
        if len(transfer):
            for pipe in self.pipes:
                pipe.send(("submit", transfer))
        return transfer.id

    def store(self, keys: list[int], blocks: list[int]) -> int:
        return self.submit(self.scheduler.store(names(keys), blocks))

    def load(self, keys: list[int], blocks: list[int]) -> int:
        return self.submit(self.scheduler.load(names(keys), blocks))

    def finish(self, *transfers: int) -> dict[int, np.ndarray]:
        """The statuses of these transfers, over both ranks."""
        statuses: dict[int, np.ndarray] = {}
        until = time.monotonic() + PATIENCE_S
        while True:
            for result in self.scheduler.take_finished():
                statuses[result.transfer_id] = result.statuses
            if set(transfers) <= set(statuses):
                return statuses
            assert time.monotonic() < until, "a transfer did not end"
            for report in self.ask("poll", 0.01):
                self.scheduler.apply(report)

    def stop(self) -> None:
        self.ask("stop")
        for process in self.processes:
            process.join()


def names(keys: list[int]) -> list[bytes]:
    return [b"block-%d" % key for key in keys]


SOURCES = list(range(BLOCKS // 2))
TARGETS = list(range(BLOCKS // 2, BLOCKS))


def check_rounds(pair: Pair, rounds: int, random: np.random.Generator) -> dict[str, Any]:
    """Concurrent stores of fresh blocks and loads of earlier ones, shuffled."""
    stored: list[int] = []
    wrong = loaded = missed = 0
    for turn in range(rounds):
        keys = list(range(turn * BATCH, (turn + 1) * BATCH))
        sources = random.permutation(SOURCES)[:BATCH].tolist()
        pair.ask("fill", keys, sources)
        wanted = random.permutation(stored)[:BATCH].tolist() if stored else []
        targets = random.permutation(TARGETS)[: len(wanted)].tolist()
        if wanted:
            pair.ask("poison", targets)
        store = pair.store(keys, sources)
        load = pair.load(wanted, targets)
        statuses = pair.finish(store, load)
        assert (statuses[store] == RowStatus.OK).all(), statuses[store]
        stored += keys
        good = [i for i, status in enumerate(statuses[load].tolist()) if status == RowStatus.OK]
        loaded += len(good)
        missed += len(wanted) - len(good)
        if good:
            found = pair.ask("wrong", [wanted[i] for i in good], [targets[i] for i in good])
            wrong += sum(found)
    return {"rounds": rounds, "loaded": loaded, "missed": missed, "wrong": wrong}


def check_contexts(pair: Pair) -> dict[str, Any]:
    """Which process has memory on which GPU, by nvidia-smi."""
    if pair.device == "cpu":
        return {"skipped": "no GPUs"}
    query = ["nvidia-smi", "--format=csv,noheader"]
    gpus = run([*query, "--query-gpu=index,uuid"])
    index_of = {line.split(", ")[1]: int(line.split(", ")[0]) for line in gpus.splitlines()}
    apps = run([*query, "--query-compute-apps=pid,gpu_uuid"])
    seen = sorted((int(line.split(", ")[0]), index_of[line.split(", ")[1]])
                  for line in apps.splitlines() if line.strip())  # fmt: skip
    per_gpu = {gpu: sum(1 for _, at in seen if at == gpu) for gpu in range(RANKS)}
    memory = run([*query, "--query-gpu=index,memory.used"])
    return {"processes_per_gpu": per_gpu, "seen": seen, "memory": memory.splitlines()}


def run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_damage(pair: Pair, key: int) -> dict[str, Any]:
    """One bit of a block on rank 1 only: a miss on both, and from then on for every lookup."""
    transfer = pair.scheduler.load(names([key]), TARGETS[:1])
    slot = int(transfer.slots[0])
    file = next(pair.path.glob("*/rank-1-of-2.kv"))
    with file.open("r+b") as opened:
        opened.seek(slot * pair.scheduler.placement.slot_bytes + 12345)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))
        os.fsync(opened.fileno())
    load = pair.submit(transfer)
    status = RowStatus(int(pair.finish(load)[load][0]))
    return {"status": status.name, "found_after": pair.scheduler.lookup(names([key]))}


def check_kill(pair: Pair, keys: list[int]) -> dict[str, Any]:
    """Rank 1 dies amid stores; rank 0 stays as it is; the restarted one recovers its slots."""
    fresh = list(range(10**6, 10**6 + BATCH))
    pair.ask("fill", fresh, SOURCES[:BATCH])
    pair.store(fresh, SOURCES[:BATCH])
    pair.kill(1)
    while pair.scheduler.open_transfers:  # rank 0 ends its share by itself
        pair.pipes[0].send(("poll", 0.01))
        pair.scheduler.apply(pair.pipes[0].recv())
    pair.scheduler.take_finished()
    went_on = pair.processes[0].is_alive() and pair.wrong_alone(0, fresh[:8]) == 0
    began = time.monotonic()
    pair.start(1)
    seconds = time.monotonic() - began
    recovered = int(pair.scheduler.readable(names(keys)).sum())
    readable = [key for key in keys if pair.scheduler.contains(names([key]))][: len(TARGETS)]
    pair.ask("poison", TARGETS[: len(readable)])
    load = pair.load(readable, TARGETS[: len(readable)])
    statuses = pair.finish(load)[load]
    return {
        "rank_0_went_on": went_on,
        "restart_s": round(seconds, 2),
        "before": len(keys),
        "recovered": recovered,
        "loaded": int((statuses == RowStatus.OK).sum()),
        "wrong": pair.ask("wrong", readable, TARGETS[: len(readable)]),
    }


# --- figures


def measure(pair: Pair, seconds: float, in_flight: int, first_key: int) -> dict[str, float]:
    """GB/s of both ranks together: stores, then loads of what was stored."""
    keys = list(range(first_key, first_key + len(SOURCES)))
    pair.ask("fill", keys, SOURCES)
    result = {}
    for what in ("store", "load"):
        if what == "load":
            pair.finish(pair.store(keys, SOURCES))
        began, moved, lost, turn = time.monotonic(), 0, 0, 0
        waiting: list[int] = []
        while time.monotonic() - began < seconds or waiting:
            while len(waiting) * BATCH < in_flight and time.monotonic() - began < seconds:
                count = min(BATCH, in_flight)
                at = turn * count % (len(SOURCES) - count + 1)
                part = slice(at, at + count)
                if what == "store":  # keys never seen before, so that each is written
                    fresh = first_key + 1000 + turn * count
                    waiting.append(pair.store(list(range(fresh, fresh + count)), SOURCES[part]))
                else:
                    waiting.append(pair.load(keys[part], TARGETS[part]))
                turn += 1
            done = pair.finish(waiting[0])
            for transfer, statuses in done.items():
                if transfer in waiting:
                    waiting.remove(transfer)
                moved += int((statuses == RowStatus.OK).sum()) * BLOCK_BYTES * RANKS
                lost += int((statuses != RowStatus.OK).sum())
        result[f"{what}_blocks_not_moved"] = lost
        result[f"{what}_gb_per_s"] = round(moved / (time.monotonic() - began) / 1e9, 3)
    return result


def one_rank(path: Path, device: str, seconds: float, in_flight: int) -> dict[str, float]:
    """The same of one rank alone, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_one_rank, args=(str(path), device, seconds, in_flight, queue))
    process.start()
    result = queue.get(timeout=PATIENCE_S + 4 * seconds)
    process.join()
    return dict(result)


def _one_rank(path: str, device: str, seconds: float, in_flight: int, queue: Any) -> None:
    if device != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    from kvdisk import DiskTier, Layout

    blocks = Blocks("cuda:0" if device != "cpu" else "cpu", 0)
    capacity = 4 * len(SOURCES) * BLOCK_BYTES
    layout = Layout.from_tensors(blocks.layers)
    keys = list(range(len(SOURCES)))
    result = {}
    with DiskTier.open(layout, make_identity(), make_config(path, capacity)) as tier:
        blocks.fill(keys, SOURCES)
        for what in ("store", "load"):
            waiting: set[int] = {tier.store(names(keys), SOURCES)} if what == "load" else set()
            while waiting:
                tier.wait(1.0)
                waiting -= {ended.transfer_id for ended in tier.poll().finished}
            began, moved, turn = time.monotonic(), 0, 0
            count = min(BATCH, in_flight)
            while time.monotonic() - began < seconds or waiting:
                while len(waiting) * BATCH < in_flight and time.monotonic() - began < seconds:
                    at = turn * count % (len(SOURCES) - count + 1)
                    part = slice(at, at + count)
                    if what == "store":
                        fresh = range(1000 + turn * count, 1000 + (turn + 1) * count)
                        waiting.add(tier.store(names(list(fresh)), SOURCES[part]))
                    else:
                        waiting.add(tier.load(names(keys[part]), TARGETS[part]))
                    turn += 1
                tier.wait(1.0)
                for ended in tier.poll().finished:
                    waiting.discard(ended.transfer_id)
                    moved += int((ended.statuses == RowStatus.OK).sum()) * BLOCK_BYTES
            result[f"{what}_gb_per_s"] = round(moved / (time.monotonic() - began) / 1e9, 3)
    queue.put(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path("build/bench/two-ranks"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=3, help="of each measurement, in alternation")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.path, ignore_errors=True)
    arguments.path.mkdir(parents=True)
    random = np.random.default_rng(20261129)

    capacity = RANKS * (arguments.rounds * BATCH + 4 * len(SOURCES)) * BLOCK_BYTES
    pair = Pair(arguments.path / "pair", arguments.device, capacity)
    facts = pair.scheduler.facts()
    report: dict[str, Any] = {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "gpus": run(["nvidia-smi", "-L"]).splitlines() if arguments.device == "cuda" else [],
        "block_bytes": BLOCK_BYTES,
        "facts": {rank: {k: v for k, v in each.items() if k != "paths"}
                  for rank, each in facts.items()},
    }  # fmt: skip
    report["rounds"] = check_rounds(pair, arguments.rounds, random)
    report["contexts"] = check_contexts(pair)
    report["damage"] = check_damage(pair, 5)
    report["kill"] = check_kill(pair, list(range(100, arguments.rounds * BATCH)))
    show(report)
    figures: dict[str, list[dict[str, float]]] = {"one": [], "two": [], "two_at_a_time": []}
    for turn in range(arguments.turns):
        key = 10**7 * (turn + 1)
        one = one_rank(arguments.path / "one", arguments.device, arguments.seconds, 4 * BATCH)
        figures["one"].append(one)
        figures["two"].append(measure(pair, arguments.seconds, 4 * BATCH, key))
        figures["two_at_a_time"].append(measure(pair, arguments.seconds, 1, key + 10**6))
    report["figures"] = figures
    pair.stop()
    show({"figures": figures})
    shutil.rmtree(arguments.path, ignore_errors=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    broken = broken_promises(report)
    for promise in broken:
        print(f"BROKEN: {promise}")
    raise SystemExit(1 if broken else 0)


def broken_promises(report: dict[str, Any]) -> list[str]:
    """What must hold and does not, in words."""
    rounds, contexts, kill = report["rounds"], report["contexts"], report["kill"]
    per_gpu = contexts.get("processes_per_gpu", {})
    must_hold = {
        "no block was wrong": rounds["wrong"] == 0 and sum(kill["wrong"]) == 0,
        "every stored block came back": rounds["loaded"] > 0 and rounds["missed"] == 0,
        "each GPU has one process": "skipped" in contexts or set(per_gpu.values()) == {1},
        "a block that one rank lost is a miss": report["damage"]["status"] == "CORRUPT",
        "and is not found again": report["damage"]["found_after"] == 0,
        "rank 0 went on when rank 1 was killed": kill["rank_0_went_on"],
        "rank 1 recovered what it had": kill["recovered"] >= 0.99 * kill["before"],
        "and loaded it": kill["loaded"] > 0,
    }
    return [promise for promise, holds in must_hold.items() if not holds]


def show(report: dict[str, Any]) -> None:
    print(json.dumps(report, indent=1), flush=True)


if __name__ == "__main__":
    main()
