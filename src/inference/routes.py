"""Entry point of environments that were installed before `plugin.routes` was a module."""

from cairn.inference.plugin.routes import CairnRoutes as CairnRoutes
