"""rlflame's own step loop for MuJoCo v5, with the same bits as Gymnasium."""
