"""The code that a worker imports, which requires only numpy and Gymnasium."""
