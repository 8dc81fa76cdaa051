"""How a run, and whatever else a command has to say, is shown: a package of small rooms.

show.py is the protocol of whoever shows a run, live.py, plain.py, json_lines.py and quiet.py do,
choice.py picks one of them; board.py has the numbers, words.py the words, layout.py the lines and
mouth.py the streams. Must not know: how anything is computed.
"""
