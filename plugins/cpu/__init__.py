"""What all kernels of CPU targets share."""
