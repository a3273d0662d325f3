"""Which blocks may be shared: one differing field is another directory (scenarios A7, A8, A11)."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdisk.errors import ConfigError, DeviceError
from kvdisk.identity import Identity, is_namespace_name, label_namespace, read_identity_fields

FIELDS: dict[str, Any] = {
    "model": "org/model",
    "weights": "sha256:abc",
    "dtype": "bfloat16",
    "block_tokens": 16,
    "layout": {"format": 1, "block_bytes": 65536, "order": "NHD"},
    "key_hash": "sha256, seed 0",
    "parallel": {"tensor": 2, "pipeline": 1},
    "quantization": "",
    "extra": {"backend": "FLASH_ATTN", "rope": {"factor": 8.0}},
}


def labelled(root: Path, identity: Identity) -> Path:
    """The identity's directory below ``root``, which says so."""
    directory = root / identity.namespace
    label_namespace(directory, identity)
    return directory


def changed() -> list[dict[str, Any]]:
    return [
        {"model": "org/other"},
        {"weights": "sha256:abd"},
        {"dtype": "float16"},
        {"dtype": "fp8_e4m3"},
        {"block_tokens": 32},
        {"layout": {**FIELDS["layout"], "order": "HND"}},
        {"layout": {**FIELDS["layout"], "block_bytes": 65537}},
        {"key_hash": "sha256, seed 1"},
        {"parallel": {"tensor": 4, "pipeline": 1}},
        {"parallel": {"tensor": 1, "pipeline": 2}},
        {"quantization": "fp8"},
        {"extra": {"backend": "TRITON_ATTN", "rope": {"factor": 8.0}}},
        {"extra": {"backend": "FLASH_ATTN", "rope": {"factor": 4.0}}},
        {"extra": {}},
    ]


def test_every_field_counts() -> None:
    names = {Identity(**FIELDS).namespace}
    for change in changed():
        names.add(Identity(**{**FIELDS, **change}).namespace)
    assert len(names) == 1 + len(changed())
    tried = {name for change in changed() for name in change}
    assert tried == {each.name for each in dataclasses.fields(Identity)}


def test_order_of_fields_and_process_do_not_count() -> None:
    backwards = {
        k: dict(reversed(v.items())) if isinstance(v, dict) else v
        for k, v in reversed(FIELDS.items())
    }
    here = Identity(**backwards).fingerprint.hex()
    assert here == Identity(**FIELDS).fingerprint.hex()
    code = (
        "import json, sys; from kvdisk.identity import Identity; "
        "print(Identity(**json.loads(sys.argv[1])).fingerprint.hex())"
    )
    for seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(FIELDS)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here


@pytest.mark.parametrize(
    "model", ["../../etc", "a/b", "x" * 5000, "\u540d\u524d", "nul\0", "-rf", " . "]
)
def test_any_model_name_gives_a_plain_directory_of_one_length(model: str, tmp_path: Path) -> None:
    identity = Identity(**{**FIELDS, "model": model})
    assert is_namespace_name(identity.namespace)
    assert len(identity.namespace) == 35
    directory = labelled(tmp_path, identity)
    assert directory.parent == tmp_path
    assert [each.name for each in directory.iterdir()] == ["kvdisk.json"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "auto"}, "not resolved"),
        ({"model": " "}, "model is empty"),
        ({"weights": ""}, "weights is empty"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"layout": {}}, "layout is empty"),
        ({"extra": {"scale": float("nan")}}, "JSON"),
        ({"extra": {"thing": object()}}, "JSON"),
        ({"extra": {1: "a"}}, "must be text"),
    ],
)
def test_what_cannot_identify_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Identity(**{**FIELDS, **change})


def test_rank_files_also_depend_on_the_layout_found_in_the_rank() -> None:
    identity = Identity(**FIELDS)
    one = identity.rank_fingerprint({"segments": [1, 2]})
    assert one == identity.rank_fingerprint({"segments": [1, 2]})
    assert one != identity.rank_fingerprint({"segments": [2, 1]})
    assert one != Identity(**{**FIELDS, "model": "m"}).rank_fingerprint({"segments": [1, 2]})


class TestNamespaceFile:
    def test_says_the_identity_and_is_private_under_any_umask(self, tmp_path: Path) -> None:
        old = os.umask(0)
        try:
            directory = labelled(tmp_path / "root", Identity(**FIELDS))
        finally:
            os.umask(old)
        file = directory / "kvdisk.json"
        assert file.stat().st_mode & 0o777 == 0o600
        assert directory.stat().st_mode & 0o777 == 0o700
        assert directory.parent.stat().st_mode & 0o777 == 0o700
        fields = read_identity_fields(directory)
        assert fields == {"format": 1, **FIELDS}
        before = file.stat().st_mtime_ns
        labelled(tmp_path / "root", Identity(**FIELDS))
        assert file.stat().st_mtime_ns == before

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"identity": 1}', b"\xff" * 100])
    def test_a_damaged_one_is_set_aside_and_written_anew(
        self, tmp_path: Path, content: bytes
    ) -> None:
        directory = labelled(tmp_path, Identity(**FIELDS))
        (directory / "kvdisk.json").write_bytes(content)
        assert read_identity_fields(directory) is None
        labelled(tmp_path, Identity(**FIELDS))
        assert read_identity_fields(directory) is not None
        assert (directory / "kvdisk.json.damaged-1").read_bytes() == content

    def test_one_that_cannot_be_replaced_stays_where_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = labelled(tmp_path, Identity(**FIELDS))
        (directory / "kvdisk.json").write_bytes(b"of an older version")

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DeviceError):
            labelled(tmp_path, Identity(**FIELDS))
        assert [each.name for each in directory.iterdir()] == ["kvdisk.json"]

    def test_a_planted_link_is_refused_or_replaced_but_never_followed(self, tmp_path: Path) -> None:
        directory = labelled(tmp_path / "root", Identity(**FIELDS))
        target = tmp_path / "target"
        target.write_text("precious")
        (directory / "kvdisk.json").unlink()
        (directory / "kvdisk.json").symlink_to(target)
        labelled(tmp_path / "root", Identity(**FIELDS))
        assert target.read_text() == "precious"
        assert not (directory / "kvdisk.json").is_symlink()
