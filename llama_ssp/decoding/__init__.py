"""A batch on the device, the rounds that move it on, and the text that comes out."""
