"""Pictures and films of policies, and clips during training."""
