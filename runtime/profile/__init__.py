"""Where the time of a step goes, and what the machine would allow at most."""
