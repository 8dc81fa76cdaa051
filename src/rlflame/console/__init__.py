"""How a run, and whatever else a command has to say, is shown: a package of small rooms.

base.py is the protocol of whoever shows a run, live.py, plain.py, json_lines.py and quiet.py do,
views.py picks one of them; progress.py has the numbers, run_text.py the words, formatting.py the
lines and output.py the streams. Must not know: how anything is computed.
"""
