"""Cairn: post-training for language models that never loses its place."""

__version__ = "0.1.0"
