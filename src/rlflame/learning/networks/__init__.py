"""Networks with hand-written gradients in numpy, and the same in torch."""
