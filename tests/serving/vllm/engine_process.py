"""A real vLLM engine in a process of its own, told what to do line by line (JSON both ways).

    {"do": "generate", "prompts": [[token, ...], ...]}   tokens, cached tokens of each
    {"do": "stress", "seed": 1, "requests": 100}         tokens by request, preemptions
    {"do": "reset"}                                      drop the engine's own prefix cache
    {"do": "metrics"}                                    counters by name and labels
    {"do": "stop"}

Everything that vLLM prints goes to standard error; answers go to a descriptor of their own.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = options.pop("kv_transfer_config", None)
    if transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    llm = LLM(
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        seed=0,
        gpu_memory_utilization=0.3,
        block_size=32,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **{"max_num_seqs": 4, "num_gpu_blocks_override": 64, **options},
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "stop":
            break
        answer = {"generate": generate, "stress": stress, "reset": reset, "metrics": metrics}[what](
            llm, **command
        )
        print(json.dumps(answer), file=answers, flush=True)


def generate(llm: Any, prompts: list[list[int]], tokens: int = 12) -> list[dict[str, Any]]:
    """One after the other, so that each can find what the ones before have left."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
    answers = []
    for prompt in prompts:
        output = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        answers.append(
            {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
        )
    return answers


def stress(llm: Any, seed: int, requests: int) -> dict[str, Any]:
    """Requests over shared prefixes, more than the cache holds, some aborted on the way."""
    from vllm import SamplingParams

    chance = random.Random(seed)
    documents = [[chance.randrange(3, 1000) for _ in range(700)] for _ in range(12)]
    greedy = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
    engine = llm.llm_engine
    aborted = {str(number) for number in range(requests) if number % 12 == 11}
    for number in range(requests):
        document = chance.choice(documents)[: chance.randrange(100, 640)]
        own = [chance.randrange(3, 1000) for _ in range(chance.randrange(1, 60))]
        engine.add_request(str(number), {"prompt_token_ids": document + own}, greedy)
    waiting, tokens, steps = sorted(aborted, key=int), {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
        steps += 1
        if waiting and steps % 20 == 0:
            engine.abort_request([waiting.pop(0)])
    return {"tokens": {k: v for k, v in tokens.items() if k not in aborted}, "steps": steps}


def reset(llm: Any) -> bool:
    return bool(llm.reset_prefix_cache())


def metrics(llm: Any) -> dict[str, float]:
    found = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
            name = metric.name + (json.dumps(labels, sort_keys=True) if labels else "")
            found[name] = metric.value
    return found


if __name__ == "__main__":
    main()
