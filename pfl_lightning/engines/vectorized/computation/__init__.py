"""The computation of one step of many clients: eager, compiled, or as a CUDA graph."""
