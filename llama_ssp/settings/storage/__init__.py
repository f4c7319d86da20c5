"""Storage formats, one module each: layouts in files, bytes, cost, and by name the reader and the kernel."""
