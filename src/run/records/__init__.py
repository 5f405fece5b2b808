"""Records of data sets: read as they are written, checked, and identified by their content."""
