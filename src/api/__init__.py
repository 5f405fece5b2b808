"""The public API: what `import cairn` offers (docs/reference/api.md). Its parts are imported on first use."""
