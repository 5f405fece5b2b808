"""Paths in settings."""

import os


def absolute_if_there(value: str) -> str:
    """The path of what exists, made absolute, as Ray's workers have another current directory."""
    return os.path.abspath(value) if value and os.path.exists(value) else value
