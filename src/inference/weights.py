"""The old entry point of `cairn.inference.plugin.weights`, for environments that were installed before it moved."""

from cairn.inference.plugin.weights import register as register
