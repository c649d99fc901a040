"""What only a measurement tells: the fastest way for each kernel on this machine, the best settings to serve with."""
