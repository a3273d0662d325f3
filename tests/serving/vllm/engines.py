"""Engines to test against, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
PATIENCE_S = 300
BLOCK_TOKENS = 32
ENGINE_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "seed": 0,
    "gpu_memory_utilization": 0.3,
    "block_size": BLOCK_TOKENS,
    "enable_prefix_caching": True,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
}
# Time decides no test: limits that a busy machine does not reach, and hits that are loaded whole.
UNHURRIED = {
    "load_deadline": "60s",
    "store_deadline": "60s",
    "store_wait": "60s",
    "partial_loads": "off",
}
PROMPT_TOKENS = 600  # 18 blocks of 32 and a rest
CACHED = 576  # the whole blocks of a prompt: what can come back
PROMPTS = range(6)  # more than the cache of 64 blocks holds
SLOT_BYTES_MIN = 64 << 10  # with two ranks or two groups; the others are multiples


class Engine:
    """An engine process; each method is a command to it."""

    def __init__(
        self, log: Path, *, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        self.log = log
        command = json.dumps({**ENGINE_OPTIONS, **options})
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_process.py"), command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env=engine_environment() | (environment or {}),
            text=True,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended:\n{self.log.read_text()[-4000:]}"
        return json.loads(line)

    def tell(self, what: str, **options: Any) -> Any:
        assert self.process.stdin is not None
        print(json.dumps({"do": what, **options}), file=self.process.stdin, flush=True)
        return self._answer()

    def generate(self, *numbers: int) -> list[dict[str, Any]]:
        return self.tell("generate", prompts=[prompt(number) for number in numbers])

    def metric(self, name: str) -> float:
        found = self.tell("metrics")
        return sum(value for key, value in found.items() if key.startswith(name))

    def stop(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            print(json.dumps({"do": "stop"}), file=self.process.stdin, flush=True)
            self.process.wait(PATIENCE_S)


def engine_environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
    }


def prompt(number: int) -> list[int]:
    return [(i * 37 * (number + 1) + number) % 1000 + 3 for i in range(PROMPT_TOKENS)]


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["cached"] for answer in answers]


def flip_a_bit_in_every_slot(file: Path) -> None:
    with file.open("r+b") as opened:
        for offset in range(0, file.stat().st_size, SLOT_BYTES_MIN):
            opened.seek(offset + 5000)
            byte = opened.read(1)
            opened.seek(offset + 5000)
            opened.write(bytes([byte[0] ^ 4]))


def assert_nothing_left(one: Engine) -> None:
    """Of an ``in_process`` engine."""
    left = one.tell("leftovers")
    assert {name: count for name, count in left.items() if count} == {}


@contextmanager
def engine(log: Path, **options: Any) -> Iterator[Engine]:
    started = Engine(log, **options)
    try:
        yield started
    finally:
        started.stop()
        if started.process.poll() is None:
            started.process.kill()


def save_model(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny Llama whose weights are large enough that wrong KV changes its tokens.

    ``changes`` are to its configuration.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1024,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.12,
        **changes,
    )
    LlamaForCausalLM(config).float().eval().save_pretrained(directory, safe_serialization=True)
    return directory


def direct(root: Path, **options: Any) -> dict[str, Any]:
    """The configuration that an operator writes for the direct mode."""
    return {
        "kv_connector": "KVDiskConnector",
        "kv_connector_module_path": "kvdisk.serving.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "path": str(root),
            "capacity": "64MiB",
            "ring": "16MiB",
            **UNHURRIED,
            **options,
        },
    }


def ram_tier() -> dict[str, str]:
    """vLLM's own on a GPU; on the CPU its device copies are replaced."""
    import torch

    if torch.cuda.is_available():
        return {"spec_name": "TieringOffloadingSpec"}
    return {"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering_spec"}


def below_ram(root: Path, ram_bytes: int = 8 << 20, **options: Any) -> dict[str, Any]:
    """The same below the engine's RAM tier, whose device copies are replaced for the CPU."""
    return {
        "kv_connector": "KVDiskTieringConnector",
        "kv_connector_module_path": "kvdisk.serving.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **ram_tier(),
            "cpu_bytes_to_use": ram_bytes,
            "secondary_tiers": [
                {
                    "type": "KVDiskTier",
                    "module_path": "kvdisk.serving.vllm",
                    "enable_kv_events": True,
                    "path": str(root),
                    "capacity": "64MiB",
                    "ring": "16MiB",
                    "store_queue": "16MiB",  # several prompts are more than half of this RAM tier
                    **UNHURRIED,
                    **options,
                }
            ],
        },
    }


MODES = pytest.mark.parametrize("mode", [direct, below_ram], ids=["direct", "below-ram"])
