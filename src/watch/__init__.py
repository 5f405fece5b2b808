"""What people look at runs with: `runs`, `watch` and `diagnose`, over the typed view of a run directory."""
