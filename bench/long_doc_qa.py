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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from long_doc_models import MODELS, document_bytes, write_model

from kvdisk import TierConfig
from kvdisk.bench.scratch import describe_place

HERE = Path(__file__).resolve().parent


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
                    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))
    same = compare_answers(results, options.modes[0])
    sys.exit(0 if same or not options.require_same else 1)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--modes", required=True, help="comma-separated, see above")
    add("--root", action="append", default=[], metavar="NAME=DIRECTORY[:...]", help="for @NAME")
    add("--documents", default="8,16,32", help="how many, one sweep after the other (8,16,32)")
    add("--rounds", type=positive, default=1, help="of each, with new documents (1)")
    add("--model", default="llama-3-8b", choices=[*MODELS], help="its geometry (llama-3-8b)")
    add("--document-tokens", type=positive, default=8192, help="of each (8192)")
    add("--device-documents", type=positive, default=8, help="what the device holds (8)")
    add("--disk-documents", type=positive, default=66, help="what kvdisk's disk holds (66)")
    add("--answer-tokens", type=positive, default=1, help="that are generated (1)")
    add("--settle", type=float, default=3.0, help="seconds between warm-up and question (3)")
    add("--dtype", default="bfloat16", help="of weights and KV (bfloat16)")
    add("--block-tokens", type=positive, help="of a block (16, on a CPU 32)")
    add("--attention", help="vLLM's attention backend (its own choice)")
    add("--memory", type=float, default=0.21, help="share of the device per engine (0.21)")
    add("--at-once", type=positive, default=4, help="engines that stand side by side (4)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="kvdisk's")
    add("--cpu", action="store_true", help="no GPU here")
    add("--require-same", action="store_true", help="fail unless all answer alike")
    add("--logs", type=Path, help="where the engines' logs go (nowhere)")
    add("--output", type=Path, help="a JSON file, written after each round")
    options = parser.parse_args(arguments)
    options.block_tokens = options.block_tokens or (32 if options.cpu else 16)
    options.modes = options.modes.split(",")
    try:
        options.documents = [positive(count) for count in options.documents.split(",")]
        options.roots = named_values(options.root)
        options.kvdisk = {"partial_loads": "auto", **named_values(options.option)}
        for mode in options.modes:
            check_mode(mode, options)
    except ValueError as error:
        parser.error(str(error))
    if len({*options.modes}) < len(options.modes):
        parser.error("--modes names one of them twice")
    if options.output and not options.output.parent.is_dir():
        parser.error(f"--output: there is no directory {options.output.parent}")
    if find_spec("vllm") is None:
        parser.error(f"{sys.executable} has no vLLM: run this with the Python that has it")
    return options


def positive(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]*", text):
        raise ValueError(f"{text!r} is not a number from 1 on")
    return int(text)


def named_values(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if not re.fullmatch("[^=]+=.+", text):
            raise ValueError(f"{text!r} is not NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def check_mode(mode: str, options: argparse.Namespace) -> None:
    tier, *own_options = mode.split("+")
    if not re.fullmatch(r"none|prefix|ram:\d+|disk@.+|fs:\d+@.+|kvdisk(:\d+)?@.+", tier):
        raise ValueError(f"{mode!r} is no mode; see --help")
    root = tier.partition("@")[2]
    if root and root not in options.roots:
        raise ValueError(f"{mode!r} names a root that is not there: add --root {root}=DIRECTORY")
    if tier.startswith("kvdisk"):
        given = {**options.kvdisk, **named_values(own_options)}
        settings = {name: value for name, value in given.items() if name != "weights"}
        TierConfig.from_mapping({"capacity": "1TiB", **settings, "path": "/"})
    elif own_options:
        raise ValueError(f"{mode!r}: options are for kvdisk's modes")


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
        self.log = options.logs and options.logs / f"{file_name(mode)}.log"
        if self.log:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log or os.devnull, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "vllm_engine.py"), json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **vllm_environment(options)},
            )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            hint = f"see {self.log}" if self.log else "name a directory with --logs"
            raise SystemExit(f"the engine of mode {self.mode} ended: {hint}")
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


def vllm_environment(options: argparse.Namespace) -> dict[str, str]:
    common = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not options.cpu:
        return common
    return {
        **common,
        # For the RAM tier on a CPU, which is in the tests; the clone's kvdisk comes with it.
        "PYTHONPATH": f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}",
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
