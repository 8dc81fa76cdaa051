"""The data an algorithm learns from: the rollouts of one iteration, or a replay."""
