"""Networks and action distributions with hand-written gradients in numpy."""
