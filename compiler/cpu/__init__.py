"""Code generation for CPUs: instruction sets, the C toolchain, the lowering to kernels."""
