"""rlflame's own step loop for MuJoCo v5, bit-for-bit identical to Gymnasium's."""
