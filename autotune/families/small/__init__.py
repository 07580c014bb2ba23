"""Small genuine pipelines with random weights, one module per family: for demos and tests, never
for training.
"""
