"""What runs in an environment's own process, with its own packages: nothing here imports Cairn."""
