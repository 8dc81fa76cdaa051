"""Images and videos of policies, and clips during training."""
