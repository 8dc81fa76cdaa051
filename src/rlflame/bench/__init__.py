"""The benchmarks of `rlflame bench`."""
