"""What is on disk of a run: its folder, its checkpoints, its logs.

safetensors_file.py is the form of every file of ours, checkpoint.py and replay_segments.py say what
stands in them, run_dir.py where they stand; run_recorder.py and machine_log.py write them. Must not
know: displays, how a run is made.
"""
