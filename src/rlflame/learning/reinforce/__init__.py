"""REINFORCE, which learns from whole episodes."""
