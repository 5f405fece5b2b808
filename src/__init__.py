"""Cairn: post-training for language models that never loses its place."""
