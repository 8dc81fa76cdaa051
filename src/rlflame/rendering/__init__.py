"""Pictures and films of policies, as files.

video.py makes one of a policy's file, clips.py short ones beside a run, clip_recorder.py asks for
them while it records. Must not know: the command line, how pixels come about.
"""
