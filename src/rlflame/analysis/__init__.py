"""What runs have left in their folders, read for charts and reports. Never writes.

run_reader.py reads, grouping.py finds runs that belong together, smoothing.py takes them together,
curves.py makes lines of it all. Must not know: how anything is drawn.
"""
