"""Soft actor-critic (SAC), with optional quantile or batch-normalised critics."""
