"""What benchmarks ship to workers as an environment file. Alone here: workers search the folder."""
