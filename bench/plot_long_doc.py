"""Draws what bench/long_doc_qa.py measured: a group of bars for each number of documents.

    python bench/plot_long_doc.py result.json --output plot.png

Each mode has a bar, the median of its question rounds; the line on it is that of the warm-up
rounds. Dots are single question rounds, where there are several.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from long_doc_qa import of_cell
from matplotlib import pyplot as plt

WIDTH = 0.8  # of a group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        document: dict[str, Any] = json.loads(options.result.read_text())
        rounds = document["rounds"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{options.result} is no result of long_doc_qa.py: {error!r}")
    modes = list(dict.fromkeys(each["mode"] for each in rounds))
    counts = sorted({each["documents"] for each in rounds})

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    bar = WIDTH / len(modes)
    for place, mode in enumerate(modes):
        at = [group - WIDTH / 2 + (place + 0.5) * bar for group in range(len(counts))]
        questions = [of_cell(rounds, mode, count, "question_s") for count in counts]
        warm_up = [median(of_cell(rounds, mode, count, "warm_up_s")) for count in counts]
        bars = axes.bar(at, [median(each) for each in questions], 0.9 * bar, label=mode)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
        for x, single in zip(at, questions, strict=True):
            if len(single) > 1:
                axes.plot([x] * len(single), single, ".", color="black", markersize=3)
        axes.hlines(warm_up, [x - 0.45 * bar for x in at], [x + 0.45 * bar for x in at], "black")
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel(f"documents of {document['document_tokens']} tokens")
    axes.set_ylabel("seconds for a question on each (line: warm-up)")
    axes.set_title(f"{document['model']}, {document['device']}, vLLM {document['vllm']}")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    axes.margins(y=0.1)
    figure.savefig(options.output, dpi=120)


if __name__ == "__main__":
    main()
