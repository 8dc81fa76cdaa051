"""Several learners of one run, as processes.

processes.py starts and watches them, follower.py is one of them, roll_call.py is where they meet,
shared_file.py the file for that on one machine, torchrun.py what torchrun says where it has
started them. Must not know: fleets, folders, displays.
"""
