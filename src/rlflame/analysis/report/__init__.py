"""Reports on runs and benchmarks as Markdown, HTML and JSON."""
