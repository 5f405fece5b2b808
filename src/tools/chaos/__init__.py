"""Strikes runs with seeded disasters and checks Cairn's promises; scripts/chaos.py is the command."""
