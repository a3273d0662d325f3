"""A real vLLM engine in a process of its own, told what to do line by line (JSON both ways).

    {"do": "generate", "prompts": [[token, ...], ...]}   tokens, cached tokens of each
    {"do": "stress", "seed": 1, "requests": 100}         tokens by request, how many were aborted
    {"do": "reset", "connector": false}                  drop the engine's own prefix cache, or all
    {"do": "metrics"}                                    counters by name and labels
    {"do": "stop"}

With the option ``in_process`` the engine's core and its worker run here, so that more can be asked:

    {"do": "leftovers"}                                  what is left of requests that ended
    {"do": "events"}                                     what a router makes of the disk's events
    {"do": "blocks"}                                     what its cache holds, as digests
    {"do": "groups"}                                     how many KV cache groups there are
    {"do": "spoil", "group": 0}                          change what the engine's cache holds

Everything that vLLM prints goes to standard error; answers go to a descriptor of their own.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

TOKENS = 24  # of an answer under stress


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    in_process = options.pop("in_process", False)
    if in_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    transfer = options.pop("kv_transfer_config", None)
    if transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    if in_process:
        options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    llm = LLM(skip_tokenizer_init=True, disable_log_stats=False, **options)
    commands = {"generate": generate, "stress": stress, "reset": reset, "metrics": metrics}
    if in_process:
        commands |= look_inside(llm)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "stop":
            break
        answer = commands[what](llm, **command)
        print(json.dumps(answer), file=answers, flush=True)


def look_inside(llm: Any) -> dict[str, Callable[..., Any]]:
    import inside

    router = inside.Router(llm)
    return {
        "leftovers": inside.leftovers,
        "groups": inside.groups,
        "blocks": inside.blocks,
        "spoil": inside.spoil,
        "events": router.report,
    }


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
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    engine = llm.llm_engine
    aborted = {str(number) for number in range(requests) if number % 12 == 11}
    for number in range(requests):
        document = chance.choice(documents)[: chance.randrange(100, 640)]
        own = [chance.randrange(3, 1000) for _ in range(chance.randrange(1, 60))]
        engine.add_request(str(number), {"prompt_token_ids": document + own}, greedy)
    waiting, tokens, newest = sorted(aborted, key=int), {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            number = output.request_id.split("-")[0]
            if output.finished:
                tokens[number] = list(output.outputs[0].token_ids)
            newest = max(newest, int(number))
        # Those whose turn it is: about to load, loading, running or preempted.
        if waiting and int(waiting[0]) <= newest + 3 and chance.random() < 0.2:
            engine.abort_request([waiting.pop(0)])
    ended = {number for number, answer in tokens.items() if len(answer) == TOKENS}
    return {
        "tokens": {number: tokens[number] for number in sorted(ended - aborted, key=int)},
        "aborted": len(aborted - ended),
    }


def reset(llm: Any, connector: bool = False) -> bool:
    return bool(llm.reset_prefix_cache(reset_connector=connector))


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
