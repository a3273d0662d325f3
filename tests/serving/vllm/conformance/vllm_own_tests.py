"""vLLM's own tests, run against kvdisk's classes: a pytest plugin, used by ``make test-vllm-own``.

Nothing of vLLM's tests is kept here. They are downloaded and run as they are; before they are
collected, kvdisk's classes take the place of those they were written for:

    * ``KVDiskTier`` for the file system tier,
    * ``KVDiskConnector`` and its halves for the offloading connector; its tests bring their own
      manager and worker, so what they check is what kvdisk changes of the connector,
    * the results that ``KVDiskConnector`` reports for those that tests of failed loads make up, in
      a scheduler whose policy kvdisk has set.

A test that is about something kvdisk does not have is named in ``NOT_OURS`` with the reason.
"""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as base_worker
from vllm.v1.kv_offload.base import LookupResult, TransferResult
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

import kvdisk.serving.vllm.connector as connector
from kvdisk.messages import PathState, RankOpened
from kvdisk.serving.vllm.connector import (
    KVDiskConnector,
    KVDiskConnectorWorker,
    KVDiskWorkerMetadata,
)
from kvdisk.serving.vllm.secondary_tier import KVDiskTier

_OWN_FILES = "of the file system tier's own files, threads and helpers"
_OWN_FAULTS = (
    "damages the file system tier's files or functions by name; here: "
    "tests/serving/vllm/test_secondary_tier.py"
)
_POLICY_FAIL = 'of the policy "fail", which kvdisk does not leave in place'
_NON_WRITER = "of ranks that do not write: with kvdisk every rank keeps its own copy"

NOT_OURS = {
    "test_invalid_path_raises_at_construction": "kvdisk says ConfigError instead",
    "test_factory_forwards_locality_to_fs_tier": "of the type of tier named fs",
    "test_shutdown_discards_pending_tasks": _OWN_FILES,
    "test_store_load_roundtrip_without_o_direct": _OWN_FILES,
    "test_wait_idle_blocks_until_tasks_complete": _OWN_FILES,
    "test_batch_lookup_c_extension": _OWN_FILES,
    "test_failed_load_corrects_verdict_and_removes_corrupt_file": _OWN_FAULTS,
    "test_batched_partial_load_failure_keeps_loaded_blocks": _OWN_FAULTS,
    "test_batched_load_first_block_fails_marks_whole_batch": _OWN_FAULTS,
    "test_transient_load_failure_leaves_file": _OWN_FAULTS,
    "test_mixed_job_results_emit_event_only_for_successful_job": _OWN_FAULTS,
    "test_partially_failed_store_emits_no_event": _OWN_FAULTS,
    "test_fs_tier_cross_tp_round_trip": "kvdisk keeps blocks of other parallel sizes apart",
    "test_prepare_store_kv_non_writer_marks_completed_without_submit": _NON_WRITER,
    "test_handle_preemptions_non_writer_acks_flushed_store": _NON_WRITER,
    "test_failed_receive_completion_honors_failure_policy[fail]": _POLICY_FAIL,
    "test_sync_fail_invalid_blocks_evicted": _POLICY_FAIL,
}


def pytest_configure(config: pytest.Config) -> None:
    """Runs before collection, in the directory that holds vLLM's ``tests``."""
    model = Path(config.rootpath) / "opt"
    _write_model_config(model)
    _replace_tier()
    _replace_connector()
    _replace_scheduler(str(model))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unused = set(NOT_OURS)
    files = {item.path.name for item in items}
    for item in items:
        name = item.name if item.name in NOT_OURS else item.name.split("[")[0]
        if name in NOT_OURS:
            unused.discard(name)
            item.add_marker(pytest.mark.skip(reason=NOT_OURS[name]))
    whole = {"test_fs_tier.py", "test_worker.py", "test_kv_load_failure_recovery.py"} <= files
    if whole and unused:
        raise pytest.UsageError(f"no such tests any more: {sorted(unused)}")


# --- the tier


class _Files:
    """Stands for the tier's names of files: every block is in the rank's one file."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def get_file_name(self, key: bytes) -> str:
        (data,) = self._root.glob("*/rank-*.kv")
        return str(data)


class _Tier(KVDiskTier):  # type: ignore[misc]
    """Takes the options of the file system tier."""

    events = None
    _store_job_keys: dict[int, Any] = {}  # noqa: RUF012

    def __init__(
        self, *arguments: Any, root_dir: str, locality: Any = None, **options: Any
    ) -> None:
        self.file_mapper = _Files(root_dir)
        for threads in ("n_read_threads", "n_write_threads"):
            options.pop(threads, None)
        size = {"path": root_dir, "capacity": "64MiB", "ring": "16MiB", "identity": "own tests"}
        size["store_queue"] = "64MiB"  # these tests store all of a RAM tier at once
        super().__init__(locality=locality, **size, **options)


def _finished(tier: KVDiskTier) -> list[Any]:
    """``drain_jobs`` would do, but it is vLLM's reset, after which a KVDiskTier has forgotten."""
    finished: list[Any] = []
    until = time.monotonic() + 30
    while (tier._jobs or tier._finished) and time.monotonic() < until:
        finished += tier.get_finished_jobs()
        time.sleep(0.001)
    return finished


def _answers(tier: KVDiskTier, keys: list[Any], ctx: Any = None, **_: Any) -> list[LookupResult]:
    from tests.v1.kv_offload.tiering import test_fs_tier as own

    return [tier.lookup(key, ctx or own._CTX) for key in keys]


def _replace_tier() -> None:
    own = importlib.import_module("tests.v1.kv_offload.tiering.test_fs_tier")
    own.FileSystemTierManager = _Tier
    own.drain = _finished
    own.lookup_and_wait = _answers


# --- the connector


class _Connector(KVDiskConnector):  # type: ignore[misc]
    """With whatever spec the test names."""


class _ConnectorWorker(KVDiskConnectorWorker):  # type: ignore[misc]
    """Its tests put mocks below it, which have no reports."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "worker" and value is not None:
            _complete_worker(value)
        super().__setattr__(name, value)


def _complete_worker(worker: Any) -> None:
    """A test's own worker lacks what ``KVDiskConnectorWorker`` asks of ours."""
    worker.take_failed = dict
    worker.take_reports = list
    worker.clear = lambda clears: None
    worker.take_opened = _opened


def _opened() -> RankOpened:
    nothing = np.empty(0)
    facts = {
        "paths": ["none"],
        "file_system": "none",
        "slots": 0,
        "slot_bytes": 0,
        "reserved_bytes": 0,
        "slot_memory_bytes": 0,
        "backend": "none",
        "backend_reason": "",
        "direct": True,
    }
    return RankOpened(0, 1, 4096, 1, nothing, nothing, nothing, nothing, 0, (PathState(),), facts)


def _replace_connector() -> None:
    connector.KVDiskSpec = lambda config, vllm_config: OffloadingSpecFactory.create_spec(config)
    connector._name_spec = lambda vllm_config: None
    connector.KVDiskConnectorWorker = _ConnectorWorker
    base_worker.OffloadingConnectorWorker = _ConnectorWorker
    KVConnectorFactory._registry["OffloadingConnector"] = lambda: _Connector
    own = importlib.import_module("tests.v1.kv_connector.unit.offloading_connector.utils")
    own.OffloadingConnector = _Connector
    make_spec = own.MockOffloadingSpec.__init__

    def make_complete_spec(self: Any, config: Any) -> None:
        make_spec(self, config)
        self.manager.take_clears = list
        self.manager.apply = lambda reports: None
        self.manager.scheduler = SimpleNamespace(disk_rate=lambda direction: None)
        self.tier_config = SimpleNamespace(
            partial_loads="off", load_deadline_ns=10**9, evict_waiting_last=True
        )
        self.token_bytes = 1.0

    own.MockOffloadingSpec.__init__ = make_complete_spec
    metadata = "tests.v1.kv_connector.unit.offloading_connector.test_worker_metadata"
    importlib.import_module(metadata).OffloadingWorkerMetadata = KVDiskWorkerMetadata


# --- failed loads


def _replace_scheduler(model: str) -> None:
    own = importlib.import_module("tests.v1.kv_connector.unit.utils")
    make_config, make_output = own.create_vllm_config, own.create_model_runner_output

    def create_vllm_config(*arguments: Any, **options: Any) -> Any:
        if not arguments and options.get("model", "facebook/opt-125m") == "facebook/opt-125m":
            options["model"] = model
        return make_config(*arguments, **options)

    def create_scheduler(vllm_config: Any, *arguments: Any, **options: Any) -> Any:
        connector._require_recompute(vllm_config)
        return make_scheduler(vllm_config, *arguments, **options)

    def create_model_runner_output(*arguments: Any, **options: Any) -> Any:
        output = make_output(*arguments, **options)
        told = output.kv_connector_output
        if told is not None and told.finished_recving:
            results, blocks = _told_by_ours(told.finished_recving, told.invalid_block_ids)
            told.finished_recving = results.finished_recving
            told.failed_recving = results.failed_recving
            told.invalid_block_ids = blocks
        return output

    make_scheduler = own.create_scheduler
    own.create_vllm_config = create_vllm_config
    own.create_model_runner_output = create_model_runner_output
    for name in ("test_kv_load_failure_recovery", "test_invalid_blocks_correctness"):
        module = importlib.import_module(f"tests.v1.kv_connector.unit.{name}")
        module.create_vllm_config = create_vllm_config
        module.create_scheduler = create_scheduler
        module.create_model_runner_output = create_model_runner_output
    runner = importlib.import_module("tests.v1.kv_connector.unit.offloading_connector.utils")
    runner.create_vllm_config = create_vllm_config


class _EndedLoads:
    """A rank's worker in which a load of each request has ended, the first one's with failures."""

    def __init__(self, jobs: list[int], failed: set[int]) -> None:
        self._jobs = jobs
        self._failed = {jobs[0]: sorted(failed)} if failed else {}

    def get_finished(self) -> list[TransferResult]:
        return [TransferResult(job, True, 0, 0.0) for job in self._jobs]

    def take_failed(self) -> dict[int, list[int]]:
        return self._failed


def _told_by_ours(requests: set[str], failed: set[int]) -> tuple[Any, set[int]]:
    """What ``KVDiskConnector`` reports when loads of ``requests`` end and ``failed`` are lost."""
    jobs = dict(enumerate(sorted(requests)))
    ours = KVDiskConnector.__new__(KVDiskConnector)
    half = KVDiskConnectorWorker.__new__(KVDiskConnectorWorker)
    half._load_jobs = jobs
    half._one_group = True
    half._failed_requests, half._failed_blocks = set(), set()
    half._connector_worker_meta = connector.OffloadingWorkerMetadata()
    half.worker = _EndedLoads(list(jobs), failed)
    ours.connector_worker = half
    ours._connector_metadata = connector.OffloadingConnectorMetadata({}, {})
    results = ours.get_transfer_results(set())
    return results, ours.get_block_ids_with_load_errors()


def _write_model_config(directory: Path) -> None:
    """Sizes of a small model, instead of one from a hub."""
    directory.mkdir(exist_ok=True)
    fields = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 768,
        "torch_dtype": "float16",
    }
    (directory / "config.json").write_text(json.dumps(fields))
