"""``kvdisk bench``: how fast stores and loads are on this disk, and how that compares with fio.

What always holds: the file that is written has no name, so Ctrl-C or a crash leaves nothing behind
and nothing else in the directory is touched; mistakes are one line and exit status 2; data that
does not read back as written is exit status 1. Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from kvdisk.cli import EXIT_BAD_VERDICT
from kvdisk.cli.text import NamedPath, require_writable, write_json
from kvdisk.errors import ConfigError

_ROUNDS_COMPARED: Final = 5


@click.command(context_settings={"show_default": True})
@click.argument("directory", required=False, type=NamedPath())
@click.option("--path", type=NamedPath(), help="The same as DIRECTORY.")
@click.option(
    "--layer",
    type=click.Choice(["whole", "raw"]),
    default="whole",
    help="whole: blocks of a KV cache, copied, checksummed, recorded; raw: the backend "
    "alone, in fio's loop.",
)
@click.option(
    "--rw", default="write", help="read, write, randread, randwrite, rw or randrw, as in fio."
)
@click.option("--rwmixread", type=int, default=50, help="Percent of reads in rw and randrw.")
@click.option("--bs", help="Bytes of a block, as fio writes sizes: 128k is 131072.")
@click.option("--size", help="Bytes of one job's part of the file.  [default: 1GiB]")
@click.option("--model", help="Take the block's geometry from a model.  [default: llama-3-8b]")
@click.option("--layers", type=int, help="Segments of a block, one per layer.")
@click.option("--segment", help="Bytes of a segment.")
@click.option("--tokens", type=int, help="Tokens of a block.  [default: 16; MLA: 64]")
@click.option("--iodepth", type=int, default=32, help="I/Os in flight, of each job.")
@click.option("--numjobs", type=int, default=1, help="Jobs at once (whole: shards of the engine).")
@click.option("--runtime", default="5s", help="Of each round; a bare number is seconds.")
@click.option("--rounds", type=int, help="How often.  [default: 1; with --compare: 5]")
@click.option("--backend", type=click.Choice(["auto", "uring", "threads"]), default="auto")
@click.option(
    "--direct/--no-direct",
    default=None,
    help="Insist on O_DIRECT, or never use it.  [default: where the disk takes it]",
)
@click.option("--verify/--no-verify", default=True, help="Read everything back and compare.")
@click.option(
    "--allow-unregistered",
    is_flag=True,
    help="Go on when the buffers cannot be registered with io_uring.",
)
@click.option(
    "--ring",
    help="Bytes of bounce buffers of a shard, whole layer.  [default: 4 x iodepth blocks]",
)
@click.option("--device", default="cpu", help="Where the blocks lie: cpu, cuda or cuda:N.")
@click.option("--seed", type=int, default=1, help="Of data and random places.")
@click.option(
    "--compare",
    default="",
    help="fio, threads or both: the same job by fio, or by one thread with one I/O in "
    "flight, in alternating rounds.",
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    help='Write the result as JSON in the shape of fio\'s; "-" is stdout.',
)
@click.option("--plot", "plot_file", metavar="FILE", help="Draw it (PNG or SVG).")
def bench(
    directory: Path | None,
    path: Path | None,
    compare: str,
    json_file: str | None,
    plot_file: str | None,
    direct: bool | None,
    rounds: int | None,
    **options: Any,
) -> int:
    """Measure stores and loads in DIRECTORY.

    A file without a name is made there, --size times --numjobs large; nothing is left behind. The
    disk must have room for it twice with --compare threads.

    \b
    kvdisk bench /mnt/nvme --rw read --compare fio
    kvdisk bench /mnt/nvme --layer raw --bs 128k --iodepth 8 --rw randread
    kvdisk bench /mnt/nvme --model llama-3-70b-tp8 --rw write --json result.json
    """
    # Only here, so that --help needs no native module.
    from kvdisk.bench.job import Options, make_job
    from kvdisk.bench.progress import Phases
    from kvdisk.bench.report import as_json, table, text_rows
    from kvdisk.bench.session import run_session

    if path is not None and directory is not None:
        raise ConfigError("the directory is given twice: as an argument and with --path.")
    contenders = list(dict.fromkeys(name for name in compare.split(",") if name.strip()))
    if rounds is None:
        rounds = _ROUNDS_COMPARED if contenders else 1
    job = make_job(
        Options(
            path=path or directory,
            direct="auto" if direct is None else "require" if direct else "off",
            rounds=rounds,
            **options,
        )
    )
    require_writable(json_file, plot_file)
    with Phases() as phases:
        outcome = run_session(job, contenders, phases.begin)
    document = as_json(outcome)
    click.echo(table(text_rows(outcome)), err=json_file == "-")
    if json_file is not None:
        write_json(document, json_file)
    if plot_file is not None:
        from kvdisk.bench.plot import draw

        draw([document], Path(plot_file))
    wrong = outcome.verdict is not None and outcome.verdict.wrong > 0
    return EXIT_BAD_VERDICT if wrong else 0
