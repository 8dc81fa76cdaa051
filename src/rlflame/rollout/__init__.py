"""Everything that a worker imports; depends only on numpy and Gymnasium."""
