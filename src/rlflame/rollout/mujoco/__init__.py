"""rlflame's own step loop for the MuJoCo v5 environments, bit for bit equal to Gymnasium's."""
