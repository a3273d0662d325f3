"""Geometry of well-known models: how many bytes of KV a token takes, and in how many pieces.

The numbers are those of each model's public ``config.json`` (fields named beside each entry); a
token takes, in each layer, 2 (K and V) x KV heads x head size x bytes of a number. With tensor
parallelism a rank holds its share of the heads. DeepSeek's latent attention (MLA) keeps one vector
of ``kv_lora_rank + qk_rope_head_dim`` numbers instead (DeepSeek-V2, arXiv 2405.04434, section 2.1),
the same on every rank.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from kvdisk.errors import ConfigError

_BYTES_16_BIT: Final = 2
# vLLM's default block size; its MLA backends use 64.
_TOKENS: Final = 16
_TOKENS_MLA: Final = 64


@dataclass(frozen=True)
class Preset:
    """One rank's share of a model: ``layers`` segments of ``token_bytes`` x tokens each."""

    layers: int
    token_bytes: int  # of one layer
    tokens: int  # of a block, unless the user says otherwise
    source: str


def _heads(layers: int, kv_heads: int, head_size: int, source: str) -> Preset:
    return Preset(layers, 2 * kv_heads * head_size * _BYTES_16_BIT, _TOKENS, source)


PRESETS: Final[dict[str, Preset]] = {
    # num_hidden_layers, num_key_value_heads / tensor parallel size, head_dim
    "llama-3-8b": _heads(32, 8, 128, "meta-llama/Meta-Llama-3-8B, bfloat16"),
    "llama-3-8b-tp4": _heads(32, 2, 128, "meta-llama/Meta-Llama-3-8B, bfloat16, 1 of 4 ranks"),
    "llama-3-70b": _heads(80, 8, 128, "meta-llama/Meta-Llama-3-70B, bfloat16"),
    "llama-3-70b-tp8": _heads(80, 1, 128, "meta-llama/Meta-Llama-3-70B, bfloat16, 1 of 8 ranks"),
    "mistral-7b": _heads(32, 8, 128, "mistralai/Mistral-7B-v0.3, bfloat16"),
    "qwen2.5-7b": _heads(28, 4, 128, "Qwen/Qwen2.5-7B, bfloat16"),
    "qwen3-8b": _heads(36, 8, 128, "Qwen/Qwen3-8B, bfloat16"),
    "qwen3-32b-tp4": _heads(64, 2, 128, "Qwen/Qwen3-32B, bfloat16, 1 of 4 ranks"),
    # num_hidden_layers, kv_lora_rank 512 + qk_rope_head_dim 64
    "deepseek-v3-mla": Preset(
        61, (512 + 64) * _BYTES_16_BIT, _TOKENS_MLA, "deepseek-ai/DeepSeek-V3, bfloat16 cache"
    ),
}
_ALIASES: Final = {"deepseek-mla": "deepseek-v3-mla", "llama": "llama-3-8b", "qwen": "qwen3-8b"}


def find_preset(name: str) -> Preset:
    """Raises ConfigError, naming the nearest, when there is no such model."""
    key = _ALIASES.get(name.lower(), name.lower())
    if key in PRESETS:
        return PRESETS[key]
    near = difflib.get_close_matches(key, PRESETS, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise ConfigError(f'model="{name}": the models are {", ".join(PRESETS)}.{hint}')
