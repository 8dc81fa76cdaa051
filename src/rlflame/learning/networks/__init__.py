"""Networks with hand-written gradients in numpy, and their torch counterparts."""
