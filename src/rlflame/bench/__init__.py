"""What `rlflame bench` measures."""
