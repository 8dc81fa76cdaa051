"""Reads run folders and turns them into charts and reports."""
