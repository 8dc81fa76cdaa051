"""What is on disk of a run: its folder, its checkpoints, its logs.

tensor_file.py is the form of every file of ours, checkpoint.py and segments.py say what stands in
them, run_folder.py where they stand; recorder.py and machine_log.py write them. Must not
know: displays, how a run is made.
"""
