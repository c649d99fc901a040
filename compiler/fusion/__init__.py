"""Loop fusion: whatever no structured kernel takes becomes generated loops.

Views are composed as index maps instead of being computed (as in Halide and in torch's inductor), so that a chain of
slices, transposes, concatenations and arithmetic is one loop over its result.
"""
