"""What `import cairn` offers (docs/api.md). Imported on first use: `import cairn` is quick."""
