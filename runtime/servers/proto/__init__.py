"""Protocol buffers of our own services, and the modules that tools/generate_protos.py makes of them."""
