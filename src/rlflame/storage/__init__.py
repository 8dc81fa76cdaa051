"""Files: checkpoints, run folders, records, replay segments and exports."""
