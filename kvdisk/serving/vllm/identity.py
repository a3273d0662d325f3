"""The identity of a vLLM engine's KV: everything resolved that changes a block's bytes.

Computed from the engine's configuration alone, so that every process of an engine gets the same,
and the same again after a restart. What is not sure to leave the bytes alone is in it: a field too
many costs a cold start, one too few a wrong answer.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any, Final

import torch
from vllm.logger import init_logger

from kvdisk import Identity

logger = init_logger("vllm.kvdisk")

_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES: Final = 64 << 10
_SAMPLES_PER_FILE: Final = 16
UNKNOWN_WEIGHTS: Final = "unknown"


def identity_of(
    vllm_config: Any, layout: dict[str, object], *, replica: int, weights: str
) -> Identity:
    """The identity of the engine that ``vllm_config`` describes.

    ``layout`` is what the scheduler and every rank know alike of the cache's layout. ``replica`` is
    the data-parallel index: replicas share nothing. ``weights`` is what ``resolve_weights`` gave.
    """
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    return Identity(
        model=str(model.model),
        weights=weights,
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=int(cache.block_size),
        layout=layout,
        key_hash=f"{cache.prefix_caching_hash_algo}, seed {os.environ.get('PYTHONHASHSEED', '-')}",
        parallel={
            "replica": replica,
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "prefill_context": getattr(parallel, "prefill_context_parallel_size", 1),
            "decode_context": getattr(parallel, "decode_context_parallel_size", 1),
        },
        quantization=str(model.quantization or ""),
        extra={
            "vllm": str(vllm.__version__),
            "model_dtype": str(model.dtype).removeprefix("torch."),
            "model_config": _model_config(model),
            "attention_backend": str(getattr(vllm_config.attention_config, "backend", "")),
            "device": _device(),
            "speculative": str(vllm_config.speculative_config or ""),
            "mamba": f"{getattr(cache, 'mamba_cache_dtype', '')} "
            f"{getattr(cache, 'mamba_ssm_cache_dtype', '')}",
            "calculate_kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
            "lora": str(vllm_config.lora_config or ""),
        },
    )


def chosen_backends(vllm_config: Any) -> list[str]:
    """The attention backends of the layers: what vLLM made of "auto". In a rank's process only.

    Each has its own order of the bytes in a block.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    with_backend = [layer for layer in layers if hasattr(layer, "get_attn_backend")]
    return sorted({str(layer.get_attn_backend().get_name()) for layer in with_backend})


def expected_backend(vllm_config: Any) -> str | None:
    """What ``chosen_backends`` will find, for a process without the layers; None: nobody can tell.

    vLLM is asked as its plain attention layers ask it.
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model, cache = vllm_config.model_config, vllm_config.cache_config
    try:
        with set_current_vllm_config(vllm_config):
            backend = get_attn_backend(
                model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=bool(model.use_mla)
            )
        return str(backend.get_name())
    except Exception:
        logger.exception("kvdisk: vLLM does not say which attention backend it chooses.")
        return None


def resolve_weights(vllm_config: Any, said: str) -> tuple[str, str | None]:
    """What distinguishes the weights, and why blocks must not outlive this engine (None: they may).

    ``said`` is what the operator said of them, if anything. Reads some of the weights' files.
    """
    weights = said or known_weights(vllm_config.model_config) or UNKNOWN_WEIGHTS
    return weights, _why_nothing_may_be_kept(vllm_config, weights, said)


def _why_nothing_may_be_kept(vllm_config: Any, weights: str, said: str) -> str | None:
    if random_hash_seed(vllm_config):
        return (
            f"{vllm_config.cache_config.prefix_caching_hash_algo} hashes blocks with a seed that "
            "differs in every process: set PYTHONHASHSEED, or use --prefix-caching-hash-algo sha256"
        )
    if said:
        return None
    if weights == UNKNOWN_WEIGHTS:
        return 'it cannot be told which weights these are: name them with the option "weights"'
    if vllm_config.lora_config is not None:
        return (
            "adapters (LoRA) are known by name only, and may change under it: name weights and "
            'adapters with the option "weights"'
        )
    return None


def random_hash_seed(vllm_config: Any) -> bool:
    """Block hashes differ in every process, so that nothing stored is ever found again."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None


def known_weights(model: Any) -> str | None:
    """What distinguishes the weights of vLLM's ``model_config``; None when that cannot be told.

    Of a hub model the commit that was loaded; of a directory or file, name, size and time of change
    of every file, and samples of its content, so that weights saved anew under the same name are
    other weights. A link to a content-addressed file, as in a hub's cache, counts by its target.
    """
    path = Path(str(getattr(model, "model_weights", "") or model.model))
    if path.is_dir():
        return _fingerprint_of(sorted(path.iterdir()))
    if path.is_file():
        return _fingerprint_of([path])
    commit = getattr(model.hf_config, "_commit_hash", None)
    return f"commit {commit}" if commit else None


def weights_of_path(model: str) -> str | None:
    """``known_weights`` where only the model's name or path is known."""
    path = Path(model)
    if path.is_dir():
        return _fingerprint_of(sorted(path.iterdir()))
    return _fingerprint_of([path]) if path.is_file() else None


def _fingerprint_of(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        if file.suffix not in _WEIGHT_SUFFIXES and file.suffix != ".json":
            continue
        digest.update(file.name.encode() + b"\0")
        if file.is_symlink():
            digest.update(os.path.basename(os.readlink(file)).encode() + b"\0")
        else:
            _add_file(digest, file)
    return f"files {digest.hexdigest()}"


def _add_file(digest: Any, path: Path) -> None:
    status = path.stat()
    digest.update(b"%d %d " % (status.st_size, status.st_mtime_ns))
    step = max(_SAMPLE_BYTES, status.st_size // _SAMPLES_PER_FILE)
    with path.open("rb") as file:
        for offset in range(0, status.st_size, step):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))


def _device() -> str:
    """What vLLM's choice of kernels depends on, and with it the order of the bytes in a block."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        amx = bool(torch.cpu._is_amx_tile_supported())
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={amx}"
    return str(current_platform.get_device_name())


def _model_config(model: Any) -> str:
    """A digest of the model's own configuration, overrides (RoPE and others) included."""
    config = model.hf_config
    text = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else ""
    return hashlib.blake2b(
        f"{text} {model.hf_overrides!r} {model.max_model_len}".encode(), digest_size=16
    ).hexdigest()
