"""kvdisk: the disk tier for LLM serving KV caches."""

__version__ = "0.1.0"
