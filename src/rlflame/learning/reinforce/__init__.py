"""REINFORCE on whole episodes."""
