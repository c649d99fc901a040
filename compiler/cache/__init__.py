"""The build cache: what a build made, found again by everything that it was made from."""
