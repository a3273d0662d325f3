"""What must match for stored bytes to be reusable, and the directory that follows from it.

Two servers may share blocks only when everything that shapes a block's bytes is equal: one field
that differs leads to another directory, so to misses, never to wrong answers. The fields hold
*resolved* values: "auto" says nothing about bytes and is refused.

What always holds: the fingerprint depends on the fields alone. Not on their order, the process,
``PYTHONHASHSEED`` or the machine. A namespace's name has a fixed length and is safe in any file
system, whatever the model is called.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from kvdisk.errors import ConfigError, DeviceError
from kvdisk.private_files import (
    open_private_directory,
    put_back,
    read_private,
    set_aside,
    write_private,
)

FORMAT: Final = 1  # of slots, records and this fingerprint together
NAMESPACE_FILE: Final = "kvdisk.json"
_NAMESPACE_PREFIX: Final = "kv-"
_NAMESPACE_DIGITS: Final = 32
_UNRESOLVED: Final = frozenset({"auto", "none", "default"})
NAMESPACE_FILE_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything that changes the bytes of a block, resolved.

    model
        The model's name or path, as the engine resolved it.
    weights
        What distinguishes its weights: a revision, or better a digest. Weights that change under
        one name *must* change this, or the old blocks are served for the new weights.
    dtype
        The cache's element type after "auto", such as "bfloat16" or "fp8_e4m3".
    block_tokens
        Tokens of a block.
    layout
        ``Layout.fingerprint_fields()``, or what an engine knows of the order of a block's bytes.
    parallel
        Sizes that split a block over ranks, such as ``{"tensor": 2, "pipeline": 1}``.
    key_hash
        How keys are made: algorithm and seed. A seed that differs in every process makes stored
        blocks unreachable.
    quantization
        Of weights and cache, scales included; "" when there is none.
    extra
        Whatever else matters to the engine: attention backend, RoPE scaling, engine version. Values
        are what JSON can say.

    Raises ConfigError for empty, unresolved or unspeakable values.
    """

    model: str
    weights: str
    dtype: str
    block_tokens: int
    layout: Mapping[str, object]
    key_hash: str
    parallel: Mapping[str, int] = field(default_factory=dict)
    quantization: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "weights", "dtype", "key_hash"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"identity: {name} is empty; give what the engine resolved.")
        if self.dtype.lower() in _UNRESOLVED:
            raise ConfigError(
                f'identity: dtype="{self.dtype}" is not resolved; give the type that is stored, '
                'such as "bfloat16".'
            )
        if not isinstance(self.block_tokens, int) or self.block_tokens < 1:
            raise ConfigError(f"identity: block_tokens={self.block_tokens!r} must be at least 1.")
        if not self.layout:
            raise ConfigError("identity: layout is empty; give Layout.fingerprint_fields().")
        self._canonical()

    def as_fields(self) -> dict[str, Any]:
        """All fields by name, with the format version; what ``kvdisk.json`` shows."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in named.items()}
        return {"format": FORMAT, **plain}

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: BLAKE2b over the fields as JSON with sorted keys."""
        return hashlib.blake2b(self._canonical(), digest_size=32).digest()

    @property
    def namespace(self) -> str:
        """The directory's name: 35 characters, a prefix and half of the fingerprint."""
        return _NAMESPACE_PREFIX + self.fingerprint.hex()[:_NAMESPACE_DIGITS]

    def rank_fingerprint(self, layout: Mapping[str, object]) -> bytes:
        """32 bytes for one rank's files: the identity, and the layout found in that rank."""
        text = _canonical_json(layout, "layout")
        return hashlib.blake2b(self.fingerprint + text, digest_size=32).digest()

    def _canonical(self) -> bytes:
        return _canonical_json(self.as_fields(), "identity")


def _canonical_json(value: object, what: str) -> bytes:
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what}: a value cannot be written as JSON ({error}); give text, numbers, lists."
        ) from error
    if not _names_are_text(value):
        # JSON would turn 1 and "1" into the same name.
        raise ConfigError(f"{what}: names of fields must be text.")
    return text.encode()


def _names_are_text(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _names_are_text(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_names_are_text, value))
    return True


def label_namespace(directory: Path, identity: Identity) -> None:
    """Have a namespace's directory say in its ``kvdisk.json`` whose it is.

    One that does not say this identity is set aside, never trusted: it is for people and tools to
    read, and decides nothing about bytes. Raises DeviceError when it cannot be written.
    """
    with ExitStack() as made:
        folder = open_private_directory(directory, made)
        try:
            if read_identity_fields(directory, folder) != json.loads(identity._canonical()):
                _write_identity(directory, folder, identity)
        finally:
            os.close(folder)
        made.pop_all()


def read_identity_fields(directory: Path, folder: int | None = None) -> dict[str, Any] | None:
    """What a namespace's ``kvdisk.json`` says, or None when it is missing, damaged or not ours.

    ``folder`` is a descriptor of ``directory``, if there is one already.
    """
    try:
        text = read_private(directory / NAMESPACE_FILE, NAMESPACE_FILE_BYTES_MAX, folder)
    except (OSError, ConfigError, DeviceError):
        return None
    return parse_identity(text)


def parse_identity(text: bytes) -> dict[str, Any] | None:
    """The fields in the text of a ``kvdisk.json``, or None when it does not prove itself."""
    try:
        content = json.loads(text)
        found = content["identity"]
        digest = hashlib.blake2b(_canonical_json(found, "identity"), digest_size=32).hexdigest()
    except (ValueError, KeyError, TypeError, RecursionError, ConfigError):
        return None
    return found if isinstance(found, dict) and content.get("fingerprint") == digest else None


def is_namespace_name(name: str) -> bool:
    """Whether a directory of this name could be one of ours."""
    digits = name.removeprefix(_NAMESPACE_PREFIX)
    return (
        name.startswith(_NAMESPACE_PREFIX)
        and len(digits) == _NAMESPACE_DIGITS
        and set(digits) <= set("0123456789abcdef")
    )


def _write_identity(directory: Path, folder: int, identity: Identity) -> None:
    path = directory / NAMESPACE_FILE
    content = {"fingerprint": identity.fingerprint.hex(), "identity": identity.as_fields()}
    with ExitStack() as undo:
        with suppress(FileNotFoundError):
            os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            undo.callback(put_back, folder, set_aside(folder, path), path.name)
        write_private(folder, path, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")
        undo.pop_all()
