"""Strikes runs with seeded disasters and checks Cairn's promises; `cairn chaos` is the command."""
