"""Soft actor-critic, with quantile and batch-normalised critics as options."""
