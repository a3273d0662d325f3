"""``kvdisk replay``: a recorded or generated workload against the tier, to size a disk.

What always holds: the files that are written have no name once they are open, so Ctrl-C or a crash
leaves nothing behind; mistakes, in the trace too, are one line and exit status 2; a loaded byte
that is not the stored one is exit status 1. Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvdisk.cli import EXIT_BAD_VERDICT
from kvdisk.cli.text import NamedPath, require_writable, write_json
from kvdisk.errors import ConfigError


@click.command(context_settings={"show_default": True})
@click.argument("trace")
@click.option(
    "--path",
    type=NamedPath(),
    help="A directory on the disk to replay on. Not with --simulate.",
)
@click.option("--simulate", is_flag=True, help="No I/O: the tier's allocator and policies alone.")
@click.option(
    "--capacity",
    metavar="SIZES",
    help="Of the tier, as a list.  [default: 10, 25 and 50 % of all different blocks]",
)
@click.option("--eviction", default="lru", metavar="NAMES", help="A list of lru and s3fifo.")
@click.option("--admission", default="all", metavar="NAMES", help="A list of all and second-touch.")
@click.option("--bs", help="Bytes of a block, instead of a model's.")
@click.option("--model", help="Take the block's size from a model.  [default: llama-3-8b]")
@click.option("--tokens", type=int, default=512, help="Tokens that an id of the trace stands for.")
@click.option(
    "--speed",
    default="max",
    help="Factor on the trace's time, or max: one request after another, without pauses.",
)
@click.option("--prefill-rate", type=float, default=40_000.0, help="Tokens a second, in the model.")
@click.option("--load-rate", default="2GB", help="Bytes a second that simulated loads get.")
@click.option(
    "--partial-loads",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    help="How much of a hit the model loads, as the tier's option: what pays, or all of it (off).",
)
@click.option(
    "--device-cache", metavar="SIZE", help="An LRU cache before the tier.  [default: none]"
)
@click.option("--limit", type=int, default=0, help="Only so many requests; 0 is all.")
@click.option("--backend", type=click.Choice(["auto", "uring", "threads"]), default="auto")
@click.option(
    "--direct/--no-direct",
    default=None,
    help="Insist on O_DIRECT, or never use it.  [default: where the disk takes it]",
)
@click.option("--verify/--no-verify", default=True, help="Compare every loaded byte.")
@click.option(
    "--curve/--no-curve", default=True, help="Also simulate seven capacities of each policy."
)
@click.option("--seed", type=int, default=1, help="Of the data and of a generated trace.")
@click.option("--write-trace", metavar="FILE", help="Keep the trace, as a file to replay.")
@click.option(
    "--json", "json_file", metavar="FILE", help='Write the result as JSON; "-" is stdout.'
)
@click.option("--plot", "plot_file", metavar="FILE", help="Draw it (PNG or SVG).")
def replay(
    trace: str,
    direct: bool | None,
    curve: bool,
    write_trace: str | None,
    json_file: str | None,
    plot_file: str | None,
    **options: Any,
) -> int:
    """Replay TRACE against the tier: hit rate, traffic, load latency, time to first token.

    TRACE is a file in the format of Mooncake's published traces, or a workload to be generated:
    synthetic:conversation, synthetic:documents or synthetic:mixed, with numbers behind.

    \b
    kvdisk replay trace.jsonl --path /mnt/nvme --capacity 100GiB,200GiB --eviction lru,s3fifo
    kvdisk replay synthetic:mixed,requests=20000,rate=3 --simulate --plot curve.png
    """
    # Only here, so that --help needs no native module.
    from kvdisk.bench.progress import Phases
    from kvdisk.replay.job import Options, make_job
    from kvdisk.replay.report import as_document, as_text, wrong_blocks
    from kvdisk.replay.session import replay as replay_all
    from kvdisk.replay.trace import write_trace as keep_trace

    if options["simulate"] and options["path"] is not None:
        raise ConfigError("path is for real runs: with --simulate nothing is written.")
    if not options["simulate"] and options["path"] is None:
        raise ConfigError("path is missing: name a directory to replay on, or add --simulate.")
    require_writable(json_file, plot_file, write_trace=write_trace, reads=trace)
    job = make_job(
        Options(
            trace=trace,
            direct="auto" if direct is None else "require" if direct else "off",
            **options,
        )
    )
    if write_trace is not None:
        keep_trace(job.trace, Path(write_trace))
    with Phases() as phases:
        replayed = replay_all(job, phases.begin, with_curves=curve)
    document = as_document(replayed)
    click.echo(as_text(document), err=json_file == "-")
    if json_file is not None:
        write_json(document, json_file)
    if plot_file is not None:
        from kvdisk.replay.plot import draw

        draw(document, Path(plot_file))
    return EXIT_BAD_VERDICT if wrong_blocks(document) else 0
