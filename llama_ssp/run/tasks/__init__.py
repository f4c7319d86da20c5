"""The tasks, a file each, and the frame of a run around them."""
