"""Reports of runs and benchmarks as Markdown, HTML and JSON."""
