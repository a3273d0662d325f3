"""A vLLM engine in a process of its own, told what to do line by line (JSON both ways).

    {"do": "round", "documents": 16, "seed": 1, "settle_s": 3}   warm-up, pause, a question on each
    {"do": "stop"}

Options are one JSON object: ``engine`` goes to ``vllm.LLM``, ``document_tokens`` and
``answer_tokens`` say what a round is. Answers go to a descriptor of their own; what vLLM prints
goes to standard error.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from typing import Any

QUESTION_TOKENS = 32


class Documents:
    """The engine, and what a round asks of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        engine = dict(options["engine"])
        transfer = engine.pop("kv_transfer_config", None)
        if transfer is not None:
            engine["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.tokens = int(options["document_tokens"])
        self.vocabulary = int(options["vocabulary"])
        self.llm = LLM(
            skip_tokenizer_init=True, seed=0, enforce_eager=True, disable_log_stats=False, **engine
        )
        self.sampling = SamplingParams(
            temperature=0,
            max_tokens=int(options["answer_tokens"]),
            detokenize=False,
            ignore_eos=True,
        )

    def documents(self, count: int, seed: int) -> list[list[int]]:
        chance = random.Random(seed)
        return [
            [chance.randrange(3, self.vocabulary) for _ in range(self.tokens)] for _ in range(count)
        ]

    def ask(self, prompts: list[list[int]]) -> tuple[float, list[Any]]:
        """All at once; seconds until the last is answered, and the answers in order."""
        began = time.monotonic()
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, self.sampling, use_tqdm=False)
        return time.monotonic() - began, outputs

    def round(self, documents: int, seed: int, settle_s: float) -> dict[str, Any]:
        prompts = self.documents(documents, seed)
        before = self.counters()
        warm_up_s, first = self.ask(prompts)
        time.sleep(settle_s)  # what is still to be stored is stored
        between = self.counters()
        question = [7 + number % (self.vocabulary - 8) for number in range(QUESTION_TOKENS)]
        question_s, second = self.ask([prompt + question for prompt in prompts])
        after = self.counters()
        return {
            "warm_up_s": warm_up_s,
            "question_s": question_s,
            "cached_tokens": sum(each.num_cached_tokens for each in second),
            "prompt_tokens": documents * (self.tokens + QUESTION_TOKENS),
            "answers": [digest(each) for each in [*first, *second]],
            "counted_warm_up": difference(before, between),
            "counted_question": difference(between, after),
        }

    def counters(self) -> dict[str, float]:
        """vLLM's counters of whatever tier there is; not what only says how much is there now."""
        from vllm.v1.metrics.reader import Counter

        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if isinstance(metric, Counter) and (
                "kvdisk" in metric.name or "offload" in metric.name
            ):
                labels = {
                    k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")
                }
                found[metric.name + (json.dumps(labels) if labels else "")] = metric.value
        return found


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    changed = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: value for name, value in changed.items() if value}


def digest(output: Any) -> str:
    """Of the tokens that were answered."""
    tokens = list(output.outputs[0].token_ids)
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:8]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    options = json.loads(sys.argv[1])
    server = Documents(options)
    server.ask(server.documents(1, seed=-1))  # whatever an engine does at its first request
    answer({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        if command.pop("do") == "stop":
            break
        answer(server.round(**command))


if __name__ == "__main__":
    main()
