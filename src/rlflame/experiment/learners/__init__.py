"""Several learners of one run, as processes.

learners/launcher.py starts and watches them, learners/replica_main.py is one of them,
learners/liveness.py is where they meet, learners/shared_file.py the file for that on one machine,
torchrun.py what torchrun says where it has started them. Must not know: fleets, folders, displays.
"""
