"""Runs through seeded disasters, and what Cairn promises of them: the work of scripts/chaos.py."""
