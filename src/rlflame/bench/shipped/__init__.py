"""Environment files that benchmarks ship to workers."""
