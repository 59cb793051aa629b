"""What the kernels of several operators share."""
