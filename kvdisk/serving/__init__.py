"""Adapters for serving engines, each on kvdisk's public API alone."""
