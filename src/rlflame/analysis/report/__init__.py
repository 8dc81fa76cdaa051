"""Reports of runs as Markdown, HTML and JSON."""
