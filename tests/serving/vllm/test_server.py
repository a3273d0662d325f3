"""vLLM's OpenAI server with the configuration that docs/vllm.md gives an operator."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serving.vllm.engines import (
    CACHED,
    ENGINE_OPTIONS,
    PROMPTS,
    direct,
    engine_environment,
    prompt,
    save_model,
)

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

STARTS_S = 300.0
STOPS_S = 60.0


class Server:
    """``python -m vllm.entrypoints.openai.api_server`` in a process group of its own."""

    def __init__(self, model: Path, transfer: dict[str, Any], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        options = {
            **ENGINE_OPTIONS,
            "model": str(model),
            "served_model_name": "tiny",
            "host": "127.0.0.1",
            "port": port,
            "kv_transfer_config": json.dumps(transfer),
            "enable_prompt_tokens_details": True,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in options.items():
            command.append("--" + name.replace("_", "-"))
            command += [] if value is True else [str(value)]
        self.process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=engine_environment(),
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        end = time.monotonic() + STARTS_S
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end, "the server does not start"
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def complete(self, number: int) -> tuple[list[int], int]:
        """The answer to a prompt, and how many of the prompt's tokens were cached."""
        body = {
            "model": "tiny",
            "prompt": prompt(number),
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
        details = found["usage"]["prompt_tokens_details"] or {}
        return found["choices"][0]["token_ids"], int(details.get("cached_tokens") or 0)

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        assert lines, f"no {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def stop(self) -> int:
        """As an operator does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOPS_S)

    def wait_until_gone(self) -> None:
        """With all the processes that it has started."""
        end = time.monotonic() + STOPS_S
        with suppress(ProcessLookupError):
            while True:
                os.killpg(self.process.pid, 0)
                assert time.monotonic() < end, "processes are left"
                time.sleep(0.1)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOPS_S)


@contextmanager
def server(model: Path, transfer: dict[str, Any], log: Path) -> Iterator[Server]:
    started = Server(model, transfer, log)
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.kill()


def save_tokenizer(directory: Path) -> None:
    """A word for each token: without a tokenizer the server does not start."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1024)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)


def test_evicted_prompts_come_back_and_metrics_say_so(
    reference: list[list[int]], tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model")
    save_tokenizer(model)
    log = tmp_path / "log"
    with server(model, direct(tmp_path / "kv"), log) as one:
        for number in PROMPTS:
            assert one.complete(number) == (reference[number], 0)
        assert one.metric("vllm:kvdisk_blocks_stored_total") >= 5 * 18
        assert one.complete(0) == (reference[0], CACHED)
        assert one.metric("vllm:kvdisk_blocks_loaded_total") >= 18
        assert one.metric("vllm:kvdisk_hits_found_total") >= 18
        assert one.metric("vllm:kvdisk_slots_resident") >= 6 * 18
        assert one.stop() == 0
        one.wait_until_gone()
    said = log.read_text()
    assert "blocks recovered" in said
    assert "Traceback" not in said
    with server(model, direct(tmp_path / "kv"), tmp_path / "second.log") as again:
        assert again.complete(3) == (reference[3], CACHED)
