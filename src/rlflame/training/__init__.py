"""The training loop: collect, learn, evaluate, record."""
