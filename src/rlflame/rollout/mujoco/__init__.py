"""rlflame's own step loop for Gymnasium's MuJoCo v5 environments."""
