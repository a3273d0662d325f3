"""What bench/long_doc_qa.py computes: models of a shape, with weights that mean nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

BF16_BYTES = 2

# Geometries with dummy weights: what a Llama of this shape takes. "tiny" has real random ones.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "rope_theta": 500000.0,
    },
    "qwen-32b": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "rope_theta": 1000000.0,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "rope_theta": 10000.0,
        "initializer_range": 0.12,  # large enough that wrong KV changes the answer
    },
}


def write_model(directory: Path, options: argparse.Namespace) -> None:
    shape = MODELS[options.model]
    if options.model == "tiny":
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(**shape, max_position_embeddings=16384, bos_token_id=1, eos_token_id=2)
        LlamaForCausalLM(config).float().eval().save_pretrained(directory)
        return
    directory.mkdir()
    config_json = {
        **shape,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": options.dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config_json))


def document_bytes(options: argparse.Namespace) -> int:
    shape = MODELS[options.model]
    head = shape["hidden_size"] // shape["num_attention_heads"]
    element = 4 if options.dtype == "float32" else BF16_BYTES
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * element
    return int(token * options.document_tokens)
