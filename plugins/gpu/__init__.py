"""What the kernels of GPU targets share. Modules named gpu.py import triton; everything else here does not."""
