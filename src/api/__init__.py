"""The public API: what `import cairn` offers (docs/api.md). Its parts are imported on first use."""
