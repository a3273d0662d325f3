"""A config that exists is valid; everything else says what to change. Includes A20 and A31."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvdisk.config import TierConfig
from kvdisk.errors import BusyError, ConfigError, DeviceError, KVDiskError, LayoutError
from kvdisk.memory import memory_headroom, require_slot_memory

GIB = 1024**3
NEEDED: dict[str, object] = {"path": "/mnt/nvme/kv", "capacity": "200GiB"}


def test_path_and_size_are_enough() -> None:
    config = TierConfig.from_mapping(NEEDED)
    assert config.paths == (Path("/mnt/nvme/kv"),)
    assert config.capacity_bytes == 200 * GIB
    assert (config.direct, config.backend, config.persist) == ("auto", "auto", True)
    assert config.store_depth_beside_loads == 2


def test_every_option_from_text() -> None:
    config = TierConfig.from_mapping(
        {
            "path": ["/a", "/b/../c"],
            "capacity": "1TB",
            "direct": "require",
            "backend": "threads",
            "iodepth": "64",
            "store_depth_beside_loads": 8,
            "ring": "512m",
            "merge": "128k",
            "load_reserve": 0,
            "store_queue": "1g",
            "load_deadline": "250ms",
            "store_deadline": "30s",
            "shards": 2,
            "persist": "false",
        }
    )
    assert config.paths == (Path("/a"), Path("/c"))
    assert config.capacity_bytes == 10**12
    assert config.load_deadline_ns == 250 * 10**6
    assert config.store_queue_bytes == GIB
    assert config.persist is False


def test_effective_names_every_option_and_reads_back() -> None:
    config = TierConfig.from_mapping({**NEEDED, "load_deadline": "1500us", "capacity": "1.5TB"})
    effective = config.effective()
    assert TierConfig.from_mapping(effective) == config
    assert TierConfig.from_mapping(json.loads(json.dumps(effective))) == config
    assert len(effective) == len(fields(TierConfig))
    assert effective["ring"] == "256MiB"
    assert effective["load_deadline"] == "1500us"


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("capcity", "capacity"),
        ("capacity_bytes", "capacity"),
        ("load-deadline", "load_deadline"),
        ("queue_depth", "iodepth"),
        ("O_DIRECT", "direct"),
        ("root", "path"),
        ("io_depth", "iodepth"),
    ],
)
def test_an_unknown_option_is_an_error_that_names_the_right_one(option: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f'did you mean "{meant}"'):
        TierConfig.from_mapping({**NEEDED, option: "1"})


def test_an_option_like_no_other_lists_them_all() -> None:
    with pytest.raises(ConfigError, match=r"the options are path, capacity, direct"):
        TierConfig.from_mapping({**NEEDED, "zzz": 1})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"capacity": "200gb"}, "write 200GiB"),
        ({"capacity": "12k"}, "between 1MiB and"),
        ({"capacity": None}, "capacity"),
        ({"path": ""}, "not the name of a directory"),
        ({"path": "a\0b"}, "not the name of a directory"),
        ({"path": []}, "path is missing"),
        ({"path": 7}, "write a directory"),
        ({"path": ["/a", "/b/../a"]}, "named twice"),
        ({"path": "~nobody-of-that-name/kv"}, "write the full path"),
        ({"direct": "required"}, 'Did you mean "require"'),
        ({"direct": True}, "must be one of"),
        ({"backend": "io_uring"}, 'Did you mean "uring"'),
        ({"iodepth": 0}, "between 1 and 1024"),
        ({"iodepth": -1}, "between 1 and 1024"),
        ({"iodepth": 1.5}, "whole number"),
        ({"iodepth": True}, "whole number"),
        ({"store_depth_beside_loads": 0}, "store_depth_beside_loads"),
        ({"ring": "1000001"}, "between 1MiB and"),
        ({"ring": "2MB"}, "multiple of 4KiB"),
        ({"ring": "2MiB", "shards": 4}, "set ring to 4MiB"),
        ({"load_reserve": 1}, "between 0 and 0.9"),
        ({"load_reserve": "nan"}, "between 0 and 0.9"),
        ({"load_reserve": "a quarter"}, "share between 0 and 1"),
        ({"load_deadline": 2}, "write the unit"),
        ({"load_deadline": "1us"}, "between 1ms and 1h"),
        ({"persist": 1}, "true or false"),
        ({"shards": 65}, "between 1 and 64"),
    ],
)
def test_wrong_values_say_what_to_write(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TierConfig.from_mapping({**NEEDED, **options})
    assert says in str(caught.value)


@pytest.mark.parametrize("missing", ["path", "capacity"])
def test_a_missing_option_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        TierConfig.from_mapping({key: value for key, value in NEEDED.items() if key != missing})


@pytest.mark.parametrize(
    "wrong",
    [
        {"paths": (Path("relative"),)},
        {"paths": ("/a",)},
        {"capacity_bytes": "200GiB"},
        {"persist": "false"},
        {"load_reserve": 1},
        {"iodepth": "3"},
    ],
)
def test_typed_construction_is_checked_as_well(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TierConfig(**{"paths": (Path("/a"),), "capacity_bytes": GIB, **wrong})


def test_a_ring_is_divided_into_whole_buffers() -> None:
    config = TierConfig.from_mapping({**NEEDED, "ring": "64MiB", "merge": "1MiB", "shards": 2})
    assert config.buffers_per_shard(2 * 1024**2) == (2 * 1024**2, 16)
    assert config.buffers_per_shard(300 * 1024) == (900 * 1024, 36)
    assert config.buffers_per_shard(16 * 1024**2) == (16 * 1024**2, 2)
    with pytest.raises(ConfigError, match="set ring to 128MiB or more"):
        config.buffers_per_shard(32 * 1024**2)


def _machine(root: Path, available_kib: int, groups: str, files: dict[str, object]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, value in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


def test_a_request_above_free_memory_is_refused(tmp_path: Path) -> None:
    root = _machine(tmp_path, 2 * 1024**2, "", {})
    TierConfig.from_mapping({**NEEDED, "ring": "2GiB"}).check_memory(root)
    with pytest.raises(ConfigError, match=r"ring=3GiB asks for 3.00 GiB.*MemAvailable.*2.00 GiB"):
        TierConfig.from_mapping({**NEEDED, "ring": "3GiB"}).check_memory(root)


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (
            "0::/pod/engine\n",
            {
                "pod/memory.max": 4 * GIB,
                "pod/memory.current": 3 * GIB,
                "pod/memory.stat": f"anon 1\ninactive_file {GIB // 2}\nactive_file {GIB // 2}",
                "pod/engine/memory.max": "max",
                "pod/engine/memory.current": 3 * GIB,
            },
        ),
        (
            "3:cpu:/x\n2:memory:/elsewhere/on/the/host\n0::/\n",
            {
                "memory/memory.limit_in_bytes": 4 * GIB,
                "memory/memory.usage_in_bytes": 3 * GIB,
                "memory/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 0",
            },
        ),
    ],
    ids=["v2 limit on an ancestor", "v1 in a container"],
)
def test_a_request_above_the_control_group_is_refused(
    tmp_path: Path, groups: str, files: dict[str, object]
) -> None:
    root = _machine(tmp_path, 64 * 1024**2, groups, files)
    headroom = memory_headroom(root)
    assert headroom is not None
    assert headroom.available_bytes == 2 * GIB
    TierConfig.from_mapping({**NEEDED, "ring": "2GiB"}).check_memory(root)
    with pytest.raises(ConfigError, match="control group"):
        TierConfig.from_mapping({**NEEDED, "ring": "3GiB"}).check_memory(root)


def test_slots_that_take_more_memory_than_there_is_are_refused(tmp_path: Path) -> None:
    root = _machine(tmp_path, 8 * 1024**2, "", {})
    require_slot_memory(32 << 20, 240, GIB // 2, root)
    with pytest.raises(ConfigError, match=r"capacity.*67108864 slots.*15\.00 GiB.*8\.00 GiB"):
        require_slot_memory(64 << 20, 240, 0, root)
    with pytest.raises(ConfigError, match=r"beside 1\.00 GiB for the ring"):
        require_slot_memory(32 << 20, 240, GIB, root)


def test_a_system_that_tells_nothing_sets_no_limit(tmp_path: Path) -> None:
    assert memory_headroom(tmp_path) is None
    require_slot_memory(1 << 30, 1 << 10, root=tmp_path)
    TierConfig.from_mapping({**NEEDED, "ring": "512GiB"}).check_memory(tmp_path)


def test_this_machine_has_a_limit() -> None:
    headroom = memory_headroom()
    assert headroom is not None
    assert headroom.available_bytes > 0


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a"),
        LayoutError("b"),
        DeviceError("c", errno=28, op="fallocate", path="/x"),
        BusyError("d", path="/x", holder=7),
    ],
)
def test_errors_survive_a_process_boundary(error: KVDiskError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
