"""The old entry point of `cairn.inference.plugin.routes`, for environments that were installed before it moved."""

from cairn.inference.plugin.routes import CairnRoutes as CairnRoutes
