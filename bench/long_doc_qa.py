"""The long-document workload on a real vLLM engine: what a tier saves, and what it costs.

A round is a warm-up over N documents, a pause, and a question on each document in the same order.
The device's cache holds few of them, so from some N on every document has left it by then. All
modes get the same documents; engines stand side by side and take turns, round by round, as many at
once as fit the device. See docs/when-it-pays.md.

Modes, any of them with ``ROOT`` one of the names given by ``--root`` (kvdisk takes several
directories there, ``NAME=ONE:OTHER``, the others the first of them):
    none          no prefix caching
    prefix        prefix caching on the device alone
    ram:N         + vLLM's RAM tier of N documents
    disk@ROOT     + vLLM's own direct disk tier
    fs:N@ROOT     + vLLM's RAM tier of N documents, its file system tier below
    kvdisk@ROOT   + KVDiskConnector
    kvdisk:N@ROOT + vLLM's RAM tier of N documents, KVDiskTier below
Behind the last two, ``+NAME=VALUE`` is an option for this mode alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvdisk.bench.scratch import describe_place

HERE = Path(__file__).resolve().parent
BF16_BYTES = 2

# Geometries with dummy weights: what a Llama of this shape takes. "tiny" has real random ones.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "rope_theta": 500000.0,
    },
    "qwen-32b": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "rope_theta": 1000000.0,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "rope_theta": 10000.0,
        "initializer_range": 0.12,  # large enough that wrong KV changes the answer
    },
}


def main() -> None:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_model(model, options)
        results: list[dict[str, Any]] = []
        report = {"what": "long-document question answering", **facts(options), "rounds": results}
        for first in range(0, len(options.modes), options.at_once):
            modes = options.modes[first : first + options.at_once]
            for result in take_turns(modes, model, options):
                results.append(result)
                if options.output:  # after each round: what ends early has shown what it did
                    Path(options.output).write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))
    same = compare_answers(results, options.modes[0])
    sys.exit(0 if same or not options.require_same else 1)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", required=True, help="comma-separated, see above")
    parser.add_argument("--root", action="append", default=[], metavar="NAME=DIRECTORY[:...]")
    parser.add_argument("--documents", default="8,16,32")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", default="llama-3-8b", choices=[*MODELS])
    parser.add_argument("--document-tokens", type=int, default=8192)
    parser.add_argument("--device-documents", type=int, default=8, help="what the device holds")
    parser.add_argument("--disk-documents", type=int, default=66, help="what the disk holds")
    parser.add_argument("--answer-tokens", type=int, default=1)
    parser.add_argument(
        "--settle", type=float, default=3.0, help="seconds between warm-up and question"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-tokens", type=int, help="of a block; default 16, on a CPU 32")
    parser.add_argument("--attention", help="vLLM's attention backend")
    parser.add_argument("--memory", type=float, default=0.21, help="share of the device per engine")
    parser.add_argument("--at-once", type=int, default=4, help="engines that stand side by side")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="kvdisk's"
    )
    parser.add_argument("--cpu", action="store_true", help="no GPU here")
    parser.add_argument("--require-same", action="store_true", help="fail unless all answer alike")
    parser.add_argument("--logs", type=Path, help="where the engines' logs go")
    parser.add_argument("--output")
    options = parser.parse_args(arguments)
    options.block_tokens = options.block_tokens or (32 if options.cpu else 16)
    options.modes = options.modes.split(",")
    options.documents = [int(count) for count in options.documents.split(",")]
    try:
        options.roots = named_values(options.root)
        options.kvdisk = {"partial_loads": "auto", **named_values(options.option)}
        for mode in options.modes:
            check_mode(mode, options.roots)
    except ValueError as error:
        parser.error(str(error))
    return options


def named_values(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if not re.fullmatch("[^=]+=.+", text):
            raise ValueError(f"{text!r} is not NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def check_mode(mode: str, roots: dict[str, str]) -> None:
    tier, *own_options = mode.split("+")
    named_values(own_options)
    if not re.fullmatch(r"none|prefix|ram:\d+|disk@.+|fs:\d+@.+|kvdisk(:\d+)?@.+", tier):
        raise ValueError(f"{mode!r} is no mode; see --help")
    root = tier.partition("@")[2]
    if root and root not in roots:
        raise ValueError(f"{mode!r} names a root that is not there: add --root {root}=DIRECTORY")


def write_model(directory: Path, options: argparse.Namespace) -> None:
    shape = MODELS[options.model]
    if options.model == "tiny":
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(**shape, max_position_embeddings=16384, bos_token_id=1, eos_token_id=2)
        LlamaForCausalLM(config).float().eval().save_pretrained(directory)
        return
    directory.mkdir()
    config_json = {
        **shape,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": options.dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config_json))


def document_bytes(options: argparse.Namespace) -> int:
    shape = MODELS[options.model]
    head = shape["hidden_size"] // shape["num_attention_heads"]
    element = 4 if options.dtype == "float32" else BF16_BYTES
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * element
    return int(token * options.document_tokens)


def transfer_config(
    mode: str, roots: list[Path], options: argparse.Namespace
) -> dict[str, Any] | None:
    """What an operator would write for ``mode`` in the directories ``roots``."""
    tier, *own_options = mode.split("+")
    kind, _, ram_documents = tier.partition("@")[0].partition(":")
    if kind in ("none", "prefix"):
        return None
    root = str(roots[0]) if roots else ""
    each = document_bytes(options)
    ram_bytes = int(ram_documents or 0) * each
    disk_bytes = options.disk_documents * each
    kvdisk = {
        "path": [str(path) for path in roots],
        "capacity": f"{int(disk_bytes * 1.01)}B",
        "persist": False,
        **options.kvdisk,
        **named_values(own_options),
    }
    if kind == "kvdisk" and not ram_documents:
        return connector("KVDiskConnector", kvdisk, module="kvdisk.serving.vllm")
    if kind == "disk":
        own = {
            "kv_offload_backend": "disk",
            "disk_path": f"{root}/kv.bin",
            "disk_capacity_bytes": disk_bytes,
        }
        return connector("SimpleCPUOffloadConnector", own)
    if kind == "ram" and not options.cpu:
        return connector("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": ram_bytes})
    below: dict[str, list[dict[str, Any]]] = {
        "ram": [],
        "fs": [{"type": "fs", "root_dir": root, "n_read_threads": 16, "n_write_threads": 16}],
        "kvdisk": [{"type": "KVDiskTier", "module_path": "kvdisk.serving.vllm", **kvdisk}],
    }
    tiering: dict[str, Any] = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": ram_bytes,
        "secondary_tiers": below[kind],
    }
    if options.cpu:  # vLLM's RAM tier refuses the CPU platform
        tiering["spec_name"] = "CpuTieringSpec"
        tiering["spec_module_path"] = "tests.serving.vllm.cpu_tiering_spec"
    if kind == "kvdisk":
        return connector("KVDiskTieringConnector", tiering, module="kvdisk.serving.vllm")
    return connector("OffloadingConnector", tiering)


def connector(name: str, extra: dict[str, Any], module: str | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    if module is not None:
        config["kv_connector_module_path"] = module
    return config


class Engine:
    """One mode's engine. It starts at once; ``ready`` waits for it."""

    def __init__(self, mode: str, model: Path, options: argparse.Namespace) -> None:
        self.mode = mode
        blocks = options.device_documents * options.document_tokens // options.block_tokens + 64
        engine: dict[str, Any] = {
            "model": str(model),
            "dtype": options.dtype,
            "block_size": options.block_tokens,
            "max_model_len": options.document_tokens + 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": options.document_tokens,
            "num_gpu_blocks_override": blocks,
            "gpu_memory_utilization": options.memory,
            "enable_prefix_caching": mode != "none",
        }
        if options.model != "tiny":
            engine["load_format"] = "dummy"
        if options.attention:
            engine["attention_backend"] = options.attention
        self.roots = new_directories(mode, options)
        transfer = transfer_config(mode, self.roots, options)
        if transfer is not None:
            engine["kv_transfer_config"] = transfer
        told = {
            "engine": engine,
            "document_tokens": options.document_tokens,
            "answer_tokens": options.answer_tokens,
            "vocabulary": MODELS[options.model]["vocab_size"],
        }
        log = subprocess.DEVNULL
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            name = file_name(mode)
            log = os.open(
                options.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644
            )
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "vllm_engine.py"), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path(), **vllm_environment(options)},
        )
        if log != subprocess.DEVNULL:
            os.close(log)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine of mode {self.mode} ended: name a directory with --logs")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ready(self) -> None:
        self.answer()

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)

    def forget_documents(self) -> None:
        """Removes vLLM's files of the rounds behind it, which are not asked for again.

        Its ``fs`` tier removes none by itself and would fill the disk.
        """
        if self.mode.startswith("fs:"):
            for root in self.roots:
                for block in root.rglob("*.bin"):
                    block.unlink(missing_ok=True)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.tell(do="stop")
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for root in self.roots:
            shutil.rmtree(root, ignore_errors=True)


def new_directories(mode: str, options: argparse.Namespace) -> list[Path]:
    """For what ``mode`` keeps on its disks; removed when its engine stops."""
    root_name = mode.partition("+")[0].partition("@")[2]
    if not root_name:
        return []
    made = []
    for root in map(Path, options.roots[root_name].split(":")):
        root.mkdir(parents=True, exist_ok=True)
        made.append(Path(tempfile.mkdtemp(prefix=f"{file_name(mode)}-", dir=root)))
    return made


def file_name(mode: str) -> str:
    return re.sub("[^A-Za-z0-9_.]", "-", mode)


def python_path() -> str:
    return f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}"


def vllm_environment(options: argparse.Namespace) -> dict[str, str]:
    common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not options.cpu:
        return common
    return {
        **common,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # As many threads in each mode: by itself vLLM takes more of them where there is a tier.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) - 1)),
    }


@contextmanager
def engines(modes: list[str], model: Path, options: argparse.Namespace) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        started = []
        for mode in modes:
            started.append(Engine(mode, model, options))
            stack.callback(started[-1].stop)
        for engine in started:
            engine.ready()
        yield started


def take_turns(
    modes: list[str], model: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Every mode's rounds, in an order that rotates, so that none is always first."""
    with engines(modes, model, options) as started:
        for round_number in range(options.rounds):
            for place, documents in enumerate(options.documents):
                shift = (round_number + place) % len(started)
                for engine in started[shift:] + started[:shift]:
                    seed = 1000 * round_number + documents
                    engine.tell(do="round", documents=documents, seed=seed, settle_s=options.settle)
                    result = {
                        "mode": engine.mode,
                        "documents": documents,
                        "round": round_number,
                        **engine.answer(),
                    }
                    engine.forget_documents()
                    print(
                        f"{engine.mode:20} {documents:3} documents: warm-up "
                        f"{result['warm_up_s']:.2f} s, question {result['question_s']:.2f} s, "
                        f"{result['cached_tokens'] / documents:.0f} tokens cached",
                        flush=True,
                    )
                    yield result


def compare_answers(results: list[dict[str, Any]], first_mode: str) -> bool:
    """Whether every mode answered as the first of them did; says where not.

    In half precision an answer may depend on how the engine cuts its work into steps, tier or none.
    """
    right = {
        (each["documents"], each["round"]): each["answers"]
        for each in results
        if each["mode"] == first_mode
    }
    same = True
    for each in results:
        expected = right[each["documents"], each["round"]]
        pairs = zip(each["answers"], expected, strict=True)
        differ = [number for number, (answer, other) in enumerate(pairs) if answer != other]
        if differ:
            same = False
            print(
                f"{each['mode']}, {each['documents']} documents, round {each['round']}: "
                f"{len(differ)} of {len(expected)} answers differ from those of {first_mode}, "
                f"those of requests {differ}"
            )
    print(f"the answers of all modes are {'the same' if same else 'NOT the same'}")
    return same


def facts(options: argparse.Namespace) -> dict[str, Any]:
    from vllm import __version__

    device = "cpu"
    if not options.cpu:
        import torch

        device = torch.cuda.get_device_name(0)
    return {
        "command": sys.argv[1:],
        "commit": commit(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "device": device,
        "vllm": __version__,
        "model": options.model,
        "dtype": options.dtype,
        "attention": options.attention or "vLLM's choice",
        "document_tokens": options.document_tokens,
        "document_bytes": document_bytes(options),
        "device_documents": options.device_documents,
        "disk_documents": options.disk_documents,
        "answer_tokens": options.answer_tokens,
        "settle_s": options.settle,
        "kvdisk_options": options.kvdisk,
        "roots": {
            name: [vars(describe_place(Path(path))) for path in paths.split(":")]
            for name, paths in options.roots.items()
        },
    }


def commit() -> str:
    """Of the tree that is measured, with a + if it has been changed since."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def table(results: list[dict[str, Any]]) -> str:
    """Medians in seconds, warm-up / question, a row for each mode."""
    modes = list(dict.fromkeys(each["mode"] for each in results))
    counts = sorted({each["documents"] for each in results})
    lines = [
        "| mode | " + " | ".join(f"{count} documents" for count in counts) + " |",
        "|---" * (1 + len(counts)) + "|",
    ]
    for mode in modes:
        cells = []
        for count in counts:
            warm, question = (
                statistics.median(of_cell(results, mode, count, what))
                for what in ("warm_up_s", "question_s")
            )
            cells.append(f"{warm:.2f} / {question:.2f}")
        lines.append(f"| {mode} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def of_cell(results: list[dict[str, Any]], mode: str, documents: int, what: str) -> list[float]:
    """Of each round."""
    cell = (mode, documents)
    return [each[what] for each in results if (each["mode"], each["documents"]) == cell]


if __name__ == "__main__":
    main()
