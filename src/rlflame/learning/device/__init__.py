"""Building blocks of algorithms whose updates run on one device, with torch.

Weights, optimizer moments and the batch stay on the device. The host draws the random numbers for
many updates at once and sends them together. On a GPU, an update is captured once as a CUDA graph
and replayed; on the CPU, the same code runs eagerly, which is how it is tested.
"""
