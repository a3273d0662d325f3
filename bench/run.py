"""The whole matrix beside fio: block sizes x depths x directions x layers, in alternating rounds.

Writes a JSON document that `kvdisk plot` draws and a table in Markdown beside it, both after every
job, so that an interrupted run keeps what it has. Every number stands with machine, kernel, file
system, mode and alignment.

    python bench/run.py                              # about 25 minutes, in build/bench
    python bench/run.py --path /mnt/nvme --rounds 7 --name epyc-nvme
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvdisk.bench.job import Options, make_job
from kvdisk.bench.report import as_json, warnings_of
from kvdisk.bench.session import run_session
from kvdisk.errors import KVDiskError
from kvdisk.units import format_size, parse_size

ROOT = Path(__file__).resolve().parent.parent
# What the project promises (docs/design.md, "Numbers to reach").
TARGETS = {"raw": 0.97, "whole": 0.95}
WHOLE_TARGET_FROM_BYTES = 512 * 1024


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--size", default="1g", help="of the file")
    parser.add_argument("--blocks", default="128k,512k,2m")
    parser.add_argument("--depths", default="1,8,32")
    parser.add_argument("--rw", default="read,write")
    parser.add_argument("--layers", default="raw,whole")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runtime", default="3s", help="of each round")
    parser.add_argument(
        "--threads-at",
        type=int,
        default=32,
        metavar="DEPTH",
        help="where to compare with one I/O in flight on a thread; 0: nowhere",
    )
    parser.add_argument("--name", default="", help="kind of machine; default: disk and file system")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results")
    return parser.parse_args()


def jobs(arguments: argparse.Namespace) -> Iterator[tuple[Options, list[str]]]:
    for layer in arguments.layers.split(","):
        for rw in arguments.rw.split(","):
            for block in arguments.blocks.split(","):
                for depth in map(int, arguments.depths.split(",")):
                    contenders = ["fio"]
                    if layer == "whole" and depth == arguments.threads_at:
                        contenders.append("threads")
                    options = Options(
                        path=arguments.path,
                        layer=layer,
                        rw=rw,
                        bs=block,
                        size=arguments.size,
                        iodepth=depth,
                        runtime=arguments.runtime,
                        rounds=arguments.rounds,
                    )
                    yield options, contenders


def silent(_name: str, _total: int | None, _duration: float | None) -> Any:
    return lambda _done: None


def figure(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def row(document: dict[str, Any]) -> str:
    options = document["jobs"][0]["job options"]
    rw = options["rw"]
    direction = "read" if rw.endswith("read") else "write"
    figures = document["jobs"][0][direction]
    layer = document["kvdisk"]["layer"]
    block = int(options["bs"])
    fio = document["compare"]["fio"]
    each = fio["ratios"][direction]
    ratio = fio["ratio"][direction]
    promised = layer == "raw" or block >= WHOLE_TARGET_FROM_BYTES
    verdict = "" if not promised else "yes" if ratio >= TARGETS[layer] else "no"
    threads = document["compare"].get("threads")
    p99 = figures["clat_ns"]["percentile"]["99.000000"] / 1e6
    fio_p99 = sorted(one[direction]["clat_ns"]["percentile"]["99.000000"] for one in fio["rounds"])
    cells = [
        layer,
        rw,
        format_size(block),
        options["iodepth"],
        f"{figures['bw_bytes'] / 1e6:.0f}",
        figure(ratio),
        f"{min(each):.3f} to {max(each):.3f}",
        verdict,
        f"{p99:.1f}",
        f"{fio_p99[len(fio_p99) // 2] / 1e6:.1f}",
        figure(document["kvdisk"]["cpu"]["seconds_per_gb"]),
        figure(document["kvdisk"]["cpu"]["loop_seconds_per_gb"]),
        figure(fio["cpu"]["seconds_per_gb"]),
        figure(threads["ratio"][direction] if threads else None, ".2f"),
    ]
    return f"| {' | '.join(cells)} |"


HEADINGS = (
    *("layer", "rw", "block", "depth", "MB/s", "/ fio", "range", "promise kept", "p99 ms"),
    *("fio p99 ms", "CPU s/GB", "I/O loop s/GB", "fio CPU s/GB", "/ threads, depth 1"),
)


def markdown(documents: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    about = documents[0]["kvdisk"]
    mode, place, host = about["mode"], about["place"], about["host"]
    direct = "O_DIRECT" if mode["direct"] else "buffered"
    lines = [
        f"# kvdisk beside fio, {documents[0]['time']}",
        "",
        f"Machine: {host['machine']}, {host['processors']} processors, Linux {host['kernel']}. "
        f"Disk: {place['disk']}. File system: {place['file_system']} "
        f"({place['mount_options']}). Mode: {direct} ({mode['reason']}), alignment "
        f"{mode['alignment']}. Backend: {about['backend']['name']}, buffers "
        f"{'' if about['backend']['buffers_registered'] else 'not '}registered.",
        "",
        f"{arguments.rounds} rounds of {arguments.runtime}, fio and kvdisk in turns on the same "
        f"file of {format_size(parse_size(arguments.size))}; ratios are medians of the rounds' "
        "ratios. Promised: raw >= 0.97, whole (with copy and checksum) >= 0.95 from 512 KiB on. "
        "CPU is user and system time of the process for each 10^9 bytes, which in the whole layer "
        "includes making the blocks. Data: unique, incompressible, read back and compared.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        f"|{'---|' * len(HEADINGS)}",
        *(row(document) for document in documents),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    arguments = parse_arguments()
    arguments.path.mkdir(parents=True, exist_ok=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    documents: list[dict[str, Any]] = []
    files: list[Path] = []
    started = time.monotonic()
    for options, contenders in jobs(arguments):
        outcome = run_session(make_job(options), contenders, silent)
        document = as_json(outcome)
        # Results are kept with the sources; where the directory lay is nobody's business.
        document["jobs"][0]["job options"]["directory"] = "."
        documents.append(document)
        if not files:
            place = document["kvdisk"]["place"]
            kind = arguments.name or f"{place['disk'].split()[0]}-{place['file_system']}"
            stem = f"{datetime.date.today().isoformat()}-{kind}"
            files = [arguments.output / f"{stem}.json", arguments.output / f"{stem}.md"]
            print(*HEADINGS, sep=" | ")
        files[0].write_text(json.dumps({"results": documents}, indent=1) + "\n")
        files[1].write_text(markdown(documents, arguments))
        print(row(document), f"{time.monotonic() - started:.0f} s", flush=True)
        for text in warnings_of(outcome):
            print(f"  note: {text}", flush=True)
    print(*files)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KVDiskError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
