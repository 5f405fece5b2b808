"""Entry point of environments that were installed before `plugin.weights` was a module."""

from cairn.inference.plugin.weights import register as register
